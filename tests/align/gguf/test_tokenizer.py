"""A GGUF file's tokenizer gives the token ids that llama.cpp gives."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaTokenizer

from align.gguf.tokenizer import make_tokenizer
from tests.target_models import PIECES, piece_fields

FILE = Path("tiny.gguf")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'", "LL", "Ġbe", "Ġ20245", ";)", "ĊĊĠĠ", "Ġa"]),
        ("smollm", ["It", "'", "LL", "Ġbe", "Ġ", "2", "0", "2", "4", "5", ";)", "ĊĊĠĠ", "Ġa"]),
        ("llama-bpe", ["It", "'LL", "Ġbe", "Ġ", "202", "45", ";)ĊĊ", "ĠĠ", "Ġa"]),
        ("qwen2", ["It", "'LL", "Ġbe", "Ġ", "2", "0", "2", "4", "5", ";)ĊĊ", "ĠĠ", "Ġa"]),
        ("another", ["It", "'", "LL", "Ġbe", "Ġ20245", ";)", "ĊĊĠĠ", "Ġa"]),
    ],
)
def test_text_is_split_as_the_file_says(
    pre: str, pieces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """`tokenizer.ggml.pre`; tokens of type 4 (user-defined, as Qwen3's <think>) stay whole and are no special ones."""
    tokens = ["</s>", "<think>", "a", "b", "c", "ab", "abc", "e", "\u0301", "<", ">", "t", "h", "i", "n", "k"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    made = make_tokenizer(fields, FILE)
    inner = made.backend_tokenizer
    found = [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str("It'LL be 20245;)\n\n   a")]
    assert found == pieces
    assert made.decode(made("<think>ab</s>").input_ids, skip_special_tokens=True) == "<think>ab"
    assert made("<think>ab</s>").input_ids == [1, 5, 0]
    assert made("abc").input_ids == ([6] if pre == "llama-bpe" else [5, 4])
    assert (inner.normalizer is not None) == (pre == "qwen2")
    assert ("tokenizer.ggml.pre='another' is not known" in capsys.readouterr().err) == (pre == "another")


def by_llama_cpp(text: str, fields: dict[str, Any], prefix: bool = True) -> list[int]:
    """Its `llm_tokenizer_spm_session`, over a text without special tokens: of all neighbours whose text is a token those of the best
    score become one, the leftmost first; the rest is spelled in bytes."""
    ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = fields["tokenizer.ggml.scores"]
    symbols = list((" " * prefix + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(zip(symbols[:-1], symbols[1:], strict=True))
            if a + b in ids
        ]
        if not pairs:
            break
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    spelled = [[ids[s]] if s in ids else [ids[f"<0x{b:02X}>"] for b in s.encode()] for s in symbols]
    return [i for one in spelled for i in one]


def random_texts(seed: int) -> list[str]:
    chance = random.Random(seed)
    alphabet = [*"  abehlot\n▁é日", "the", "hell", "hello ", "😀"]
    return ["".join(chance.choices(alphabet, k=chance.randrange(24))) for _ in range(400)]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_those_of_llama_cpp(prefix: bool) -> None:
    fields = piece_fields() | {"tokenizer.ggml.add_space_prefix": prefix}
    made = make_tokenizer(fields, FILE)
    pieces = set()
    for text in random_texts(1):
        ids = made(text, add_special_tokens=False).input_ids
        assert ids == by_llama_cpp(text, fields, prefix), text
        pieces.update(made.convert_ids_to_tokens(ids))
        assert made.decode(ids) == text.replace("▁", " ")
    assert {*PIECES, "<0xF0>"} <= pieces


def test_special_tokens_stay_whole_and_a_space_follows_them() -> None:
    """As in llama.cpp, and in the hub's tokenizer.json of Llama 2; transformers' reader of GGUF files leaves that space out."""
    fields = piece_fields()
    made = make_tokenizer(fields, FILE)
    before, behind = by_llama_cpp("the", fields), by_llama_cpp(" hello", fields)
    bos, eos, user = (fields["tokenizer.ggml.tokens"].index(t) for t in ("<s>", "</s>", "<think>"))
    ids = made("<s>the<think> hello</s>", add_special_tokens=False).input_ids
    assert ids == [bos, *before, user, *behind, eos]
    assert made("the").input_ids == [bos, *before]
    assert made.decode(ids, skip_special_tokens=True) == "the<think>  hello"
    assert (made.bos_token, made.eos_token, made.unk_token) == ("<s>", "</s>", "<unk>")
    bare = make_tokenizer(fields | {"tokenizer.ggml.add_bos_token": False}, FILE)
    assert bare("the").input_ids == before


def test_texts_are_read_as_by_transformers_llama_tokenizer() -> None:
    """Made with the merges of this vocabulary, best score first. It takes a space in front of a text for the one it would put there."""
    fields = piece_fields()
    ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [
        tuple(pair.split())
        for pair in ("▁ ▁", "h e", "t he", "▁ the", "l l", "he ll", "hell o", "▁▁ ▁▁", "a b")
    ]
    theirs = LlamaTokenizer(vocab=ids, merges=merges)
    ours = make_tokenizer(fields, FILE)
    texts = [text for text in random_texts(2) if text[:1] not in (" ", "▁")]
    assert len(texts) > 200
    for text in texts:
        assert ours(text, add_special_tokens=False).input_ids == theirs(text).input_ids, text
