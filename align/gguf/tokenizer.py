"""A GGUF file's tokenizer in the hub's form: byte-level BPE (`tokenizer.ggml.model` "gpt2"), and SentencePiece's BPE ("llama")."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from align.common.text import say

_DIGITS_ALONE = {"smollm"}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _WORDS % "{1,3}"),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _WORDS % ""),
}
"""By `tokenizer.ggml.pre`, how text is split before it is merged, where not as GPT-2 does it: the pattern of the hub's tokenizer.json."""
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3"}
"""Whose words that are tokens are not put together by merges."""
_COMPOSED = {"qwen2"}
"""Whose text is in NFC."""
_AS_GPT2 = {None, "default", "gpt-2", *_DIGITS_ALONE}
_NORMAL, _UNKNOWN, _CONTROL, _USERS, _BYTE = 1, 2, 3, 4, 6
"""Types of tokens."""
_OPENS_WITH_BOS = {
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "chameleon",
    "tekken",
}
"""Whose text begins with BOS where the file does not say, as in llama.cpp; so does a SentencePiece vocabulary's."""
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
"""Tokens with which llama.cpp ends an answer whatever else the file says, their types included (`special_eog_ids` in llama-vocab.cpp)."""
_INFILLING_ENDS = {
    "fim_pad": {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"},
    "fim_rep": {"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"},
    "fim_sep": {"<|file_sep|>"},
}
"""Tokens of source code that end an answer in llama.cpp too: by the file's key, or by their text if the file has no such key."""
_BY_DEFAULT = {"unknown": 0, "bos": 1, "eos": 2}
"""Ids of a SentencePiece vocabulary where the file names none, as llama.cpp has them."""
_SPACE = "▁"


def special_id(fields: dict[str, Any], name: str) -> int | None:
    """The id of a special token (`bos`, `eos`, `eot`, `eom`, `padding`, `unknown`, `fim_pad`, …), as the file or its kind of tokenizer says."""
    by_default = _BY_DEFAULT.get(name) if fields["tokenizer.ggml.model"] == "llama" else None
    found = fields.get(f"tokenizer.ggml.{name}_token_id", by_default)
    return None if found is None else int(found)


def adds_bos(fields: dict[str, Any]) -> bool:
    """Whether the tokenizer puts BOS in front of a text, as llama.cpp decides it."""
    by_kind = fields["tokenizer.ggml.model"] == "llama" or fields.get("tokenizer.ggml.pre") in _OPENS_WITH_BOS
    return bool(fields.get("tokenizer.ggml.add_bos_token", by_kind))


def answer_ends(fields: dict[str, Any]) -> list[int]:
    """The tokens that end an answer, as in llama.cpp: those that the file names as eos, eot, eom and infilling tokens, and tokens of a known
    text. One that the file names as its unknown token ends nothing by its text."""
    tokens = fields["tokenizer.ggml.tokens"]
    named = (special_id(fields, name) for name in ("eos", "eot", "eom", *_INFILLING_ENDS))
    found = {index for index in named if index is not None and index < len(tokens)} | _ends_by_text(fields)
    no_ends = _no_ends({tokens[index] for index in found})
    return sorted(index for index in found if tokens[index] not in no_ends)


def token_types(fields: dict[str, Any]) -> list[int]:
    """The tokens' types as llama.cpp reads them: a token that ends an answer by its text is a control token, whatever the file says."""
    tokens, types = fields["tokenizer.ggml.tokens"], list(fields["tokenizer.ggml.token_type"])
    ends = _ends_by_text(fields)
    no_ends = _no_ends({tokens[index] for index in ends})
    for index in ends:
        types[index] = no_ends.get(tokens[index], _CONTROL)
    return types


def _ends_by_text(fields: dict[str, Any]) -> set[int]:
    tokens = fields["tokenizer.ggml.tokens"]
    found = {index for index, token in enumerate(tokens) if token in _ENDS}
    for name, texts in _INFILLING_ENDS.items():
        if special_id(fields, name) is None:
            found.update([index for index, token in enumerate(tokens) if token in texts][:1])
    return found - {special_id(fields, "unknown")}


def _no_ends(texts: set[str]) -> dict[str, int]:
    """The texts among those of ends that end nothing because of others, and the type of such a token."""
    found = {}
    calls = bool(texts & {"<|call|>", "<|calls|>"})
    if calls and texts & {"<|return|>", "<|flush|>"}:
        found["<|end|>"] = _USERS  # there it ends a message, not the turn
    if "<|tool_response>" in texts:
        found["</s>"] = _NORMAL
    return found


def mark_ends(tokenizer: Any, fields: dict[str, Any]) -> None:
    """Make the tokens that end an answer by their text special tokens of a tokenizer that took them for ordinary ones."""
    from tokenizers import AddedToken

    tokens, types = fields["tokenizer.ggml.tokens"], token_types(fields)
    ends = [tokens[index] for index in sorted(_ends_by_text(fields)) if types[index] == _CONTROL]
    marked = [AddedToken(token, special=True, normalized=False) for token in ends]
    tokenizer.add_tokens(marked, special_tokens=True)


def chat_templates(fields: dict[str, Any]) -> str | dict[str, str] | None:
    """The file's chat template; with named ones beside it (`tokenizer.chat_template.tool_use`) all by name, as transformers has them."""
    key = "tokenizer.chat_template"
    default = fields.get(key)
    named = {
        name.removeprefix(f"{key}."): text for name, text in fields.items() if name.startswith(f"{key}.")
    }
    if not named:
        return default
    return {"default": default, **named} if default else named


def make_tokenizer(fields: dict[str, Any], path: Path) -> Any:
    """The tokenizer of a file's metadata; `path`: for a note on a way to split text that is not known."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types = token_types(fields)
    in_pieces = fields["tokenizer.ggml.model"] == "llama"
    tokenizer = _sentencepiece(fields, tokens, types) if in_pieces else _byte_level(fields, tokens, path)
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    # Qwen3's <think>: of the text, but never split
    added = [t for t, kind in zip(tokens, types, strict=True) if kind == _USERS]
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in added])

    def token(name: str) -> str | None:
        index = special_id(fields, name)
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=token("bos"),
        eos_token=token("eos"),
        pad_token=token("padding"),
        unk_token=token("unknown"),
        chat_template=chat_templates(fields),
        clean_up_tokenization_spaces=False,
        add_bos_token=adds_bos(fields),
    )


def _byte_level(fields: dict[str, Any], tokens: Sequence[str], path: Path) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    pre = fields.get("tokenizer.ggml.pre")
    vocab = {t: i for i, t in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _SPLIT:
        split = pre_tokenizers.Split(Regex(_SPLIT[pre]), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    else:
        if pre not in _AS_GPT2:
            say(
                f"note: {path.name}: tokenizer.ggml.pre={pre!r} is not known; text is split as GPT-2 does it",
                error=True,
            )
        byte_level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        alone = pre in _DIGITS_ALONE
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if alone else byte_level
    if pre in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: dict[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Any:
    """As llama.cpp and SentencePiece read it: two neighbours whose text is a token become that token, the best score first; what is no
    token is spelled in bytes; a space in front of the text and behind each special token, where the file says so (it does by default)."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores: list[float] = fields["tokenizer.ggml.scores"]
    no_text = {t for t, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL, _BYTE)}
    bpe = models.BPE(
        vocab={t: i for i, t in enumerate(tokens)},
        merges=_merges(tokens, scores, no_text),
        unk_token=tokens[special_id(fields, "unknown") or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    prefixed = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE)] * prefixed + spaces)
    back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(back + [decoders.Strip(" ", 1, 0)] * prefixed)
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float], no_text: set[str]) -> list[tuple[str, str]]:
    """The pairs of tokens whose text is a token, the best score first. They are ranked, where SentencePiece takes the leftmost pair
    of equal scores: the same order, as each token has a score of its own."""
    scored = {t: score for t, score in zip(tokens, scores, strict=True) if t not in no_text}
    ranked = sorted(scored, key=scored.__getitem__, reverse=True)
    cut = ((t[:i], t[i:]) for t in ranked for i in range(1, len(t)))
    return [(left, right) for left, right in cut if left in scored and right in scored]
