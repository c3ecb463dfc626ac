"""Metadata that a file's tensors contradict is named by its key, from the header alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from align.common.errors import UserError
from align.gguf.fitting import check_fits
from align.gguf.header import Header

VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 12,
    "llama.context_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.rope.dimension_count": 2,
    "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "linear",
    "llama.rope.scaling.factor": 1.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.eos_token_id": 4,
}
SHAPES = {
    "token_embd.weight": (6, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (12, 8),
    "blk.0.ffn_up.weight": (12, 8),
    "blk.0.ffn_down.weight": (8, 12),
}
LENGTHS = {"tokenizer.ggml.tokens": 5, "tokenizer.ggml.token_type": 5, "tokenizer.ggml.merges": 1}


TEXTS = {
    "tokenizer.ggml.tokens": [b"a", b"b", b"ab", b"c", b"</s>", b"d", b"e"],
    "tokenizer.ggml.merges": [b"a b"],
}


def check(
    values: dict[str, Any], shapes: dict[str, Any], lengths: dict[str, Any], **texts: list[bytes]
) -> None:
    def changed(own: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in (own | other).items() if value is not None}

    counts = changed(LENGTHS, lengths)
    words = {key: list(TEXTS[key][: counts[key]]) for key in TEXTS if key in counts}
    header = Header(changed(VALUES, values), {}, changed(SHAPES, shapes), counts, {}, words | texts)
    check_fits(Path("a.gguf"), header)


def test_what_fits_passes() -> None:
    check({}, {}, {})
    check({"llama.attention.head_count_kv": None}, {f"blk.0.attn_{x}.weight": (8, 8) for x in "kv"}, {})
    wide = {f"blk.0.attn_{x}.weight": (n, 8) for x, n in (("q", 24), ("k", 12), ("v", 12))}
    wide["blk.0.attn_output.weight"] = (8, 24)
    check({"llama.attention.key_length": 6, "llama.rope.dimension_count": 6}, wide, {})
    # of other architectures little is asked
    check({"general.architecture": "gemma3", "gemma3.attention.head_count": 77}, {}, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((f"llama.attention.{name}", value) for name in ("head_count", "head_count_kv") for value in (0, -1, 3, 1, 2.0, "4", True)),
        *((f"llama.{name}", None) for name in ("block_count", "embedding_length", "feed_forward_length", "context_length")),
        ("llama.block_count", 2),
        ("llama.embedding_length", 4),
        ("llama.feed_forward_length", 8),
        ("llama.context_length", 0),
        ("llama.attention.key_length", 3),
        ("llama.attention.value_length", 3),
        ("llama.rope.dimension_count", 1),
        ("llama.rope.freq_base", 0.0),
        ("llama.rope.freq_base", math.nan),
        ("llama.attention.layer_norm_rms_epsilon", math.inf),
        ("tokenizer.ggml.eos_token_id", 5),
        ("tokenizer.ggml.bos_token_id", -1),
    ],
)  # fmt: skip
def test_values_that_are_wrong_are_named(key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^a\.gguf: llama\.|^a\.gguf: {key}") as refused:
        check({key: value}, {}, {})
    assert f"{key}: " in str(refused.value) if value is None else f"{key}={value!r}" in str(refused.value)


@pytest.mark.parametrize("merge", ["a x", "x a", "ab", "b a", "a b c", ""])
def test_merges_of_what_are_no_tokens_are_named(merge: str) -> None:
    with pytest.raises(UserError, match=r"^a\.gguf: tokenizer\.ggml\.merges: .*a merge is of two tokens"):
        check({}, {}, {}, **{"tokenizer.ggml.merges": [b"a b", merge.encode()]})


def test_a_sentencepiece_vocabulary_has_scores_instead_of_merges() -> None:
    pieces = {"tokenizer.ggml.model": "llama"}
    check(pieces, {}, {"tokenizer.ggml.merges": None, "tokenizer.ggml.scores": 5})
    with pytest.raises(UserError, match="tokenizer.ggml.scores: is not there as a list"):
        check(pieces, {}, {})
    with pytest.raises(UserError, match="tokenizer.ggml.scores: has not one entry for each"):
        check(pieces, {}, {"tokenizer.ggml.scores": 6})
    with pytest.raises(UserError, match="GGUF tokenizer 'bert' is not supported .one of: gpt2, llama"):
        check({"tokenizer.ggml.model": "bert"}, {}, {})


def test_scales_of_positions_are_read_where_they_are_linear() -> None:
    check({"llama.rope.scaling.factor": 4.0}, {"rope_freqs.weight": (1,)}, {})
    with pytest.raises(UserError, match=r"llama\.rope\.scaling\.type='yarn': .* not read from this file"):
        check({"llama.rope.scaling.factor": 4.0, "llama.rope.scaling.type": "yarn"}, {}, {})
    with pytest.raises(UserError, match="tensor 'rope_factors_long.weight': factors"):
        check({}, {"rope_factors_long.weight": (1,)}, {})
    for value in ("4", -1.0, math.nan, math.inf, True):
        with pytest.raises(UserError, match=r"llama\.rope\.scale_linear=.*: must be a number"):
            check({"llama.rope.scale_linear": value}, {}, {})


@pytest.mark.parametrize(
    ("shapes", "lengths", "says"),
    [
        ({"token_embd.weight": None}, {}, "token_embd.weight: the file has no tensor of that name"),
        ({"output_norm.weight": None}, {}, "lacks tensor 'output_norm.weight'"),
        ({"blk.0.attn_v.weight": None}, {}, "lacks tensor 'blk.0.attn_v.weight'"),
        ({}, {"tokenizer.ggml.tokens": 7}, "tokenizer.ggml.tokens: it lists 7 tokens, token_embd.weight has 6 rows"),
        ({}, {"tokenizer.ggml.token_type": 4}, "tokenizer.ggml.token_type: has not one entry for each"),
        ({}, {"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges: is not there as a list"),
        ({}, {"llama.attention.key_length": 1}, "llama.attention.key_length: is not there as a whole number"),
    ],
)  # fmt: skip
def test_tensors_and_lists_that_are_wrong_are_named(
    shapes: dict[str, Any], lengths: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        check({}, shapes, lengths)


@pytest.mark.parametrize(
    "tensor", ["blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.bias"]
)
def test_what_would_be_left_out_of_the_model_is_refused(tensor: str) -> None:
    with pytest.raises(UserError, match=f"{tensor}' has no place"):
        check({}, {tensor: (8,)}, {})
