"""Streams of bytes that are hard to tokenize, for hypothesis."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from tests.tokenizers import TEXT

HARD = [
    "  two  spaces\n\n\tand tabs ",
    "👩‍👩‍👧‍👦 😀é é \U0010ffff \ud7ff",
    "<|end|></s><0x41>▁<eos>",
    "\x00\x04\x1d",
]
# hypothesis' own text() reads tables of all of Unicode for seconds
character = st.one_of(
    st.integers(0, 0xFF), st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)
).map(chr)
words = st.lists(character, max_size=20).map("".join)
text = st.one_of(st.sampled_from(TEXT + HARD), words).map(lambda s: s.encode())
fragments = st.one_of(
    text, st.binary(max_size=6), st.just("😀".encode()[:2]), st.just("😀".encode()[2:])
)
stream = st.lists(fragments, max_size=6).map(b"".join)
quick = settings(max_examples=40, deadline=None, derandomize=True)
