"""Small tokenizers of every kind, trained on a few sentences."""

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specalign.common.hub import cache_folder
from specalign.lm.loading import load_target

TEXT = [
    "The law of a proposal says how the tokens were drawn; the target tests every one of them.",
    "A drafter proposes, the target disposes, and nothing that was committed is ever changed.",
    "Where the text repeats itself, the text repeats itself again, and the drafter is right.",
    "def law(self, sampling):\n    if sampling.greedy:\n        return 'point'\n    return 'causal'\n",
    "for token in tokens:\n    out.append(token)  # 1234 of 56789\n\n",
    "Der Entwurf geht über die Wörter hinweg, größer als nötig. Là où l'été dure, ça va très bien.",
    "日本語の文章は空白を使わない。日本語の文章。 😀😀 naïve café, I'm sure they're here.",
]
SPACES = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{b:02X}>" for b in range(256)]


def wrap(core: Tokenizer, *more: str, **roles: str) -> Any:
    """With special tokens: those of roles, and more."""
    names = dict.fromkeys((*more, *roles.values()))
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return PreTrainedTokenizerFast(tokenizer_object=core, **roles)


def train(core: Tokenizer, texts: list[str], size: int, **options: Any) -> None:
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, **options)
    core.train_from_iterator(texts, trainer)


@cache
def byte_level(size: int = 500, texts: int = 7, prefix: bool = False) -> Any:
    """GPT-2's kind, with the marks of a chat."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    core.decoder = decoders.ByteLevel()
    train(core, TEXT[:texts], size, initial_alphabet=ALPHABET)
    return wrap(
        core, "<|end|>", "<|begin|>", "<|turn|>", eos_token="<|end|>", bos_token="<|begin|>"
    )


@cache
def digits() -> Any:
    """Byte-level with cuts of its own and no token for bytes that its text lacks."""
    core = Tokenizer(models.BPE())
    cuts = [
        pre_tokenizers.Split(Regex(r"\d{1,3}|\w+|[^\w\d]"), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    core.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    train(core, TEXT[2:], 350)
    return wrap(core, eos_token="<eos>")


@cache
def sentencepiece(legacy: bool = False) -> Any:
    """Llama's kind: ▁ for spaces, bytes for what it has no character for."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    train(core, TEXT[:6], 400)
    model = json.loads(core.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *BYTES, *model["vocab"]]
    merges = [tuple(pair) for pair in model["merges"]]
    core.model = models.BPE(
        vocab={name: i for i, name in enumerate(names)}, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )  # fmt: skip
    if legacy:
        core.pre_tokenizer = None
        core.normalizer = normalizers.Sequence(SPACES)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence(steps)
    return wrap(core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def unigram() -> Any:
    """Scored pieces of `sentencepiece` (training would score them otherwise in every process)."""
    names = sorted(name for name in sentencepiece().get_vocab() if len(name) < 4)
    vocab = [("<unk>", 0.0), ("</s>", 0.0)]
    vocab += [(name, -12.0 - i % 7) for i, name in enumerate(names)]
    core = Tokenizer(models.Unigram([*vocab, *((b, -30.0) for b in BYTES)], 0, True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    return wrap(core, unk_token="<unk>", eos_token="</s>")


@cache
def debug() -> Any:
    return load_target("debug").tokenizer


@cache
def smollm2() -> Any:
    """The real one, where the target was loaded before; nothing is fetched."""
    found = sorted((cache_folder() / "targets").glob("SmolLM2-135M-Instruct*/tokenizer.json"))
    if not found:
        pytest.skip("SmolLM2 is not in the cache")
    return AutoTokenizer.from_pretrained(str(found[0].parent))


KINDS = {
    "byte-level": byte_level,
    "byte-level, space in front": lambda: byte_level(350, 4, True),
    "byte-level, bytes missing": digits,
    "sentencepiece": sentencepiece,
    "sentencepiece, legacy": lambda: sentencepiece(True),
    "unigram": unigram,
    "bytes": debug,
    "smollm2": smollm2,
}
