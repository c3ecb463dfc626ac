"""Builds the byte-level BPE tokenizer of a GGUF file, with the token ids that llama.cpp gives.

transformers' reader splits SmolLM's digits wrongly, appends tokens to Llama 3's vocabulary, and
misses DeepSeek's special tokens.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specalign.common.text import say

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = {"llama-bpe", "llama3", "llama-v3"}
_SPLITS = dict.fromkeys(_LLAMA3, _WORDS % "{1,3}") | dict.fromkeys(
    ("qwen2", "deepseek-r1-qwen"), _WORDS % ""
)
"""How text is split before merging, by `tokenizer.ggml.pre`; others as GPT-2."""
_KNOWN = {None, "default", "gpt-2", "smollm", *_SPLITS}
_NORMAL, _CONTROL, _USER = 1, 3, 4
_OPENS_WITH_BOS = _LLAMA3 | {"falcon3", "tekken"}
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
    "<｜end▁of▁sentence｜>", "[e~[",
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>",
    "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
"""Tokens that end an answer in llama.cpp whatever else the file says (`special_eog_ids`)."""
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")


def special_id(metadata: dict[str, Any], name: str) -> int | None:
    """The id of a special token (bos, eos, eot, eom, padding, unknown); None if there is none."""
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return None if found is None else int(found)


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether the tokenizer puts BOS in front of a text, as llama.cpp decides it."""
    default = metadata.get("tokenizer.ggml.pre") in _OPENS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def answer_ends(metadata: dict[str, Any]) -> list[int]:
    """The token ids that end an answer: those the file names, and those of a known text."""
    named = {special_id(metadata, name) for name in _END_KEYS}
    count = len(metadata["tokenizer.ggml.tokens"])
    found = {index for index in named if index is not None and index < count}
    return sorted(found | set(_ends_by_text(metadata)))


def _ends_by_text(metadata: dict[str, Any]) -> list[int]:
    unknown = special_id(metadata, "unknown")
    tokens = metadata["tokenizer.ggml.tokens"]
    return [index for index, token in enumerate(tokens) if token in _ENDS and index != unknown]


def chat_templates(metadata: dict[str, Any]) -> str | dict[str, str] | None:
    """The chat template; all by name if there are named ones
    (`tokenizer.chat_template.tool_use`)."""
    prefix = "tokenizer.chat_template"
    default = metadata.get(prefix)
    named = {
        key.removeprefix(f"{prefix}."): text
        for key, text in metadata.items()
        if key.startswith(f"{prefix}.")
    }
    if not named:
        return default
    return {"default": default, **named} if default else named


def make_tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that a file's metadata describes."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = list(metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens))
    for index in _ends_by_text(metadata):
        types[index] = _CONTROL
    tokenizer = _make_byte_level(metadata, tokens)
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    user = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER]
    tokenizer.add_special_tokens(_added(control, True))
    tokenizer.add_tokens(_added(user, False))  # Qwen3's <think>: plain text that is never split
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{name}_token": special_id(metadata, key) for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=chat_templates(metadata),
        clean_up_tokenization_spaces=False,
        add_bos_token=adds_bos(metadata),
        **{name: None if index is None else tokens[index] for name, index in ids.items()},
    )


def _added(tokens: list[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _make_byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _KNOWN:
        say(f"warning: unknown tokenizer.ggml.pre={pre!r}; text is split as GPT-2 does", error=True)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    by_regex = pre not in _SPLITS
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_regex)]
    if pre in _SPLITS:
        steps.insert(0, pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated"))
    elif pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
