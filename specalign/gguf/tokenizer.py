"""Builds the tokenizer of a GGUF file, with the token ids that llama.cpp gives.

Byte-level BPE (`tokenizer.ggml.model` "gpt2") and SentencePiece BPE ("llama"). transformers' reader
splits SmolLM's digits wrongly, appends tokens to Llama 3's vocabulary, and misses DeepSeek's
special tokens.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
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
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6
_OPENS_WITH_BOS = _LLAMA3 | {
    "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "chameleon", "tekken",
}  # fmt: skip
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
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
_SPACE = "▁"


def special_id(metadata: JsonObject, name: str) -> int | None:
    """The id of a special token (bos, eos, eot, eom, padding, unknown); None if there is none."""
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    default = _SENTENCEPIECE_IDS.get(name) if is_sentencepiece else None
    found = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    return None if found is None else int(found)


def adds_bos(metadata: JsonObject) -> bool:
    """Whether the tokenizer puts BOS in front of a text, as llama.cpp decides it."""
    is_sentencepiece = metadata["tokenizer.ggml.model"] == "llama"
    default = is_sentencepiece or metadata.get("tokenizer.ggml.pre") in _OPENS_WITH_BOS
    return bool(metadata.get("tokenizer.ggml.add_bos_token", default))


def answer_ends(metadata: JsonObject) -> list[int]:
    """The token ids that end an answer: those the file names, and those of a known text."""
    named = {special_id(metadata, name) for name in _END_KEYS}
    count = len(metadata["tokenizer.ggml.tokens"])
    found = {index for index in named if index is not None and index < count}
    return sorted(found | set(_ends_by_text(metadata)))


def _ends_by_text(metadata: JsonObject) -> list[int]:
    unknown = special_id(metadata, "unknown")
    tokens = metadata["tokenizer.ggml.tokens"]
    return [index for index, token in enumerate(tokens) if token in _ENDS and index != unknown]


def complete_tokenizer(tokenizer: Any, metadata: JsonObject) -> None:
    """Add what transformers' reader leaves out: special end tokens, BOS."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ends = _added([tokens[i] for i in _ends_by_text(metadata)], True)
    tokenizer.add_tokens(ends, special_tokens=True)
    if tokenizer.add_bos_token != adds_bos(metadata):
        tokenizer.add_bos_token = adds_bos(metadata)


def make_tokenizer(metadata: JsonObject) -> PreTrainedTokenizerFast:
    """The tokenizer that a file's metadata describes.

    Raises:
        UserError: neither byte-level BPE nor SentencePiece BPE.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types = list(metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens))
    for index in _ends_by_text(metadata):
        types[index] = _CONTROL
    if kind == "gpt2":
        tokenizer = _make_byte_level(metadata, tokens)
    elif kind == "llama":
        tokenizer = _make_sentencepiece(metadata, tokens, types)
    else:
        raise UserError(f"GGUF tokenizer {kind!r} is not supported (one of: gpt2, llama)")
    control = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    user = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _USER]
    tokenizer.add_special_tokens(_added(control, True))
    tokenizer.add_tokens(_added(user, False))  # Qwen3's <think>: plain text that is never split
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {f"{name}_token": special_id(metadata, key) for name, key in names.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        add_bos_token=adds_bos(metadata),
        **{name: None if index is None else tokens[index] for name, index in ids.items()},
    )


def _added(tokens: list[str], special: bool) -> list[AddedToken]:
    return [AddedToken(token, special=special, normalized=False) for token in tokens]


def _make_byte_level(metadata: JsonObject, tokens: list[str]) -> Tokenizer:
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


def _make_sentencepiece(metadata: JsonObject, tokens: list[str], types: list[int]) -> Tokenizer:
    """Neighbours whose text is a token are merged, best score first; unknown text is spelled in
    bytes.

    By default a space precedes the text and follows each special token.
    """
    scores: list[float] = metadata["tokenizer.ggml.scores"]
    scored = {
        token: score
        for token, score, type_ in zip(tokens, scores, types, strict=True)
        if type_ not in (_UNKNOWN, _CONTROL, _BYTE)
    }
    ranked = sorted(scored, key=scored.__getitem__, reverse=True)
    pairs = ((token[:i], token[i:]) for token in ranked for i in range(1, len(token)))
    bpe = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(left, right) for left, right in pairs if left in scored and right in scored],
        unk_token=tokens[special_id(metadata, "unknown") or 0],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    normal: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normal.insert(0, normalizers.Prepend(_SPACE))
        decode.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normal)
    tokenizer.decoder = decoders.Sequence(decode)
    return tokenizer
