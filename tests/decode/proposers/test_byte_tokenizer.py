"""Any bytes are spelt by tokens, and text is cut as the tokenizer cuts it in the middle of a text."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from tokenizers import pre_tokenizers

from decode.proposers.byte_tokenizer import ByteTokenizer
from tests.byte_streams import quick, stream
from tests.tokenizers import EACH_KIND, KINDS, REAL, TEXT, code_with

COMPLETE = [kind for kind in KINDS if kind not in ("byte-level, bytes missing", REAL)]


@cache
def code(kind: str) -> ByteTokenizer:
    return ByteTokenizer(KINDS[kind](), "target")


@pytest.mark.parametrize("kind", COMPLETE)
@quick
@given(data=stream)
def test_any_bytes_are_spelt_exactly(kind: str, data: bytes) -> None:
    tokens = code(kind).encode(data)
    assert code(kind).spell(tokens) == data and -1 not in tokens


@pytest.mark.parametrize(
    "kind", ["byte-level, bytes missing", pytest.param(REAL, marks=pytest.mark.slow)]
)
@quick
@given(data=stream)
def test_bytes_without_a_token_are_marked(kind: str, data: bytes) -> None:
    tokens = code(kind).encode(data)
    spelt = [code(kind).piece(token) if token >= 0 else bytes([0x100 - 1]) for token in tokens]
    lacking = bytes(b for b in range(256) if bytes([b]) not in code(kind).of)
    assert len(lacking) > 0
    assert b"".join(spelt) == bytes(0xFF if b in lacking else b for b in data)


@pytest.mark.parametrize("kind", EACH_KIND)
def test_on_plain_text_the_tokens_are_the_tokenizers_own(kind: str) -> None:
    tokenizer = KINDS[kind]()
    for line in TEXT[:5]:
        own = tokenizer(line, add_special_tokens=False)["input_ids"]
        expected = code(kind).encode(code(kind).prefix + line.encode())
        assert [t for t in expected if t >= 0] == own


@pytest.mark.parametrize(
    "kind", ["byte-level, space in front", "sentencepiece", "sentencepiece, legacy", "unigram"]
)
def test_in_the_middle_of_a_text_no_space_is_put_in_front(kind: str) -> None:
    word = code(kind).encode(b"tokens")
    assert code(kind).spell(word) == b"tokens" and len(word) < len(b"tokens")


def test_text_that_looks_like_a_special_token_is_cut_as_text() -> None:
    tokenizer = code_with([("<", "e")])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    side = ByteTokenizer(tokenizer, "target")
    assert [side.piece(token) for token in side.encode(b"<eos>")] == [b"<e", b"o", b"s", b">"]
