"""A GGUF file's tokenizer gives the token ids that llama.cpp gives."""

from __future__ import annotations

import pytest

from specalign.gguf.tokenizer import (
    adds_bos,
    answer_ends,
    chat_templates,
    make_tokenizer,
)


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
    tokens = [
        "</s>",
        "<think>",
        "a",
        "b",
        "c",
        "ab",
        "abc",
        "e",
        "\u0301",
        "<",
        ">",
        "t",
        "h",
        "i",
        "n",
        "k",
    ]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 4] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    made = make_tokenizer(fields)
    inner = made.backend_tokenizer
    found = [piece for piece, _ in inner.pre_tokenizer.pre_tokenize_str("It'LL be 20245;)\n\n   a")]
    assert found == pieces
    assert made.decode(made("<think>ab</s>").input_ids, skip_special_tokens=True) == "<think>ab"
    assert made("<think>ab</s>").input_ids == [1, 5, 0]
    assert made("abc").input_ids == ([6] if pre == "llama-bpe" else [5, 4])
    assert (inner.normalizer is not None) == (pre == "qwen2")
    assert ("unknown tokenizer.ggml.pre='another'" in capsys.readouterr().err) == (pre == "another")


@pytest.mark.parametrize(
    ("pre", "said", "adds"),
    [
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("smollm", None, False),
        ("qwen2", True, True),
        (None, None, False),
    ],
)
def test_bos_is_put_where_the_file_or_its_kind_says(
    pre: str | None, said: bool | None, adds: bool
) -> None:
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": said}
    assert adds_bos({key: value for key, value in fields.items() if value is not None}) is adds


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ("a", {"eos": 0}, {"a"}),
        ("a <|im_end|> <|endoftext|>", {"eos": 2, "eot": 1}, {"<|im_end|>", "<|endoftext|>"}),
        ("a <|im_end|> <|endoftext|>", {"eos": 2}, {"<|im_end|>", "<|endoftext|>"}),
        ("<|endoftext|> a <|im_end|>", {"eos": 2, "unknown": 0}, {"<|im_end|>"}),
        ("<|endoftext|> a <|im_end|>", {"eos": 0, "unknown": 0}, {"<|endoftext|>", "<|im_end|>"}),
        ("a b c", {"eos": 0, "eot": 1, "eom": 2}, {"a", "b", "c"}),
        ("<end_of_turn> <eos> a", {"eos": 1}, {"<end_of_turn>", "<eos>"}),
        ("a <|fim_pad|> <|fim_middle|>", {"eos": 0}, {"a", "<|fim_pad|>"}),
        ("a b", {"eos": 0, "eot": 7}, {"a"}),
    ],
)  # fmt: skip
def test_an_answer_ends_as_in_llama_cpp(names: str, keys: dict[str, int], ends: set[str]) -> None:
    """`special_eog_ids` of llama.cpp's llama-vocab.cpp."""
    tokens = names.split()
    fields = {f"tokenizer.ggml.{name}_token_id": index for name, index in keys.items()}
    fields |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}  # type: ignore[dict-item]
    assert {tokens[i] for i in answer_ends(fields)} == ends


def test_named_chat_templates_are_kept() -> None:
    key = "tokenizer.chat_template"
    assert chat_templates({}) is None and chat_templates({key: "a"}) == "a"
    assert chat_templates({f"{key}.rag": "b"}) == {"rag": "b"}
    named = {key: "a", f"{key}.tool_use": "b", "tokenizer.chat_templates": ["tool_use"]}
    assert chat_templates(named) == {"default": "a", "tool_use": "b"}


@pytest.mark.parametrize("stored", [1, 3, 4])
def test_an_end_is_one_special_token_whatever_type_the_file_says(stored: int) -> None:
    """A template writes it, so its text must be one token."""
    end = "<end_of_turn>"
    tokens = ["ab", "a", "b", *sorted({*end}), end]
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [stored],
        "tokenizer.ggml.merges": ["a b"],
    }
    last = len(tokens) - 1
    assert last in answer_ends(fields)
    made = make_tokenizer(fields)
    ids = made(f"ab{end}", add_special_tokens=False).input_ids
    assert ids == [0, last] and made.decode(ids, skip_special_tokens=True) == "ab"
    assert made.added_tokens_decoder[last].special
