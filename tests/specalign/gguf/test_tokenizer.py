"""A GGUF file's tokenizer gives the token ids that llama.cpp gives."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from specalign.gguf.tokenizer import adds_bos, answer_ends, complete_tokenizer, make_tokenizer
from tests.target_models import PIECES, piece_fields


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
def test_text_is_split(pre: str, pieces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """`tokenizer.ggml.pre`; tokens of type 4 (user-defined, as Qwen3's <think>) stay whole and are no special ones."""
    tokens = ["</s>", "<think>", *"abc", "ab", "abc", "e", "\u0301", *"<>thin", "k"]
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
    made = make_tokenizer(fields)
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
    made = make_tokenizer(fields)
    before, behind = by_llama_cpp("the", fields), by_llama_cpp(" hello", fields)
    bos, eos, user = (fields["tokenizer.ggml.tokens"].index(t) for t in ("<s>", "</s>", "<think>"))
    ids = made("<s>the<think> hello</s>", add_special_tokens=False).input_ids
    assert ids == [bos, *before, user, *behind, eos]
    assert made("the").input_ids == [bos, *before]
    assert made.decode(ids, skip_special_tokens=True) == "the<think>  hello"
    assert (made.bos_token, made.eos_token, made.unk_token) == ("<s>", "</s>", "<unk>")
    bare = make_tokenizer(fields | {"tokenizer.ggml.add_bos_token": False})
    assert bare("the").input_ids == before


@pytest.mark.parametrize(
    ("kind", "pre", "said", "adds"),
    [
        ("llama", None, None, True),
        ("llama", None, False, False),
        ("gpt2", "llama-bpe", None, True),
        ("gpt2", "llama-bpe", False, False),
        ("gpt2", "smollm", None, False),
        ("gpt2", "qwen2", True, True),
        ("gpt2", None, None, False),
    ],
)
def test_bos_where_the_file_says(kind: str, pre: str | None, said: bool | None, adds: bool) -> None:
    fields: dict[str, Any] = {"tokenizer.ggml.model": kind}
    fields |= {} if pre is None else {"tokenizer.ggml.pre": pre}
    fields |= {} if said is None else {"tokenizer.ggml.add_bos_token": said}
    assert adds_bos(fields) is adds
    if kind == "llama":
        whole = make_tokenizer({**piece_fields(), **fields})("the hello").input_ids
        assert (whole[0] == 1) == adds


@pytest.mark.parametrize(
    ("names", "keys", "ends"),
    [
        ("a <|im_end|> <|endoftext|>", {"eos": 2, "eot": 1}, {"<|im_end|>", "<|endoftext|>"}),
        ("a <|im_end|> <|endoftext|>", {"eos": 2}, {"<|im_end|>", "<|endoftext|>"}),
        ("<|endoftext|> a <|im_end|>", {"eos": 2, "unknown": 0}, {"<|im_end|>"}),
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


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("stored", [1, 3, 4])
def test_an_end_is_one_special_token_whatever_type_the_file_says(stored: int, kind: str) -> None:
    """A template writes it, so its text must be one token."""
    end = "<end_of_turn>"
    fields = piece_fields() | {"tokenizer.ggml.model": kind}
    pieces = sorted({*end})
    for key, more in (
        ("tokens", [*pieces, end]),
        ("token_type", [*[1] * len(pieces), stored]),
        ("scores", [*[-2000.0] * len(pieces), 0.0]),
    ):
        fields[f"tokenizer.ggml.{key}"] = [*fields[f"tokenizer.ggml.{key}"], *more]
    fields["tokenizer.ggml.merges"] = ["a b"]
    last = len(fields["tokenizer.ggml.tokens"]) - 1
    assert last in answer_ends(fields)
    made = make_tokenizer(fields)
    ids = made(f"ab{end}", add_special_tokens=False).input_ids
    assert ids[-1] == last and last not in ids[:-1]
    assert made.decode(ids, skip_special_tokens=True).strip() == "ab"
    assert made.added_tokens_decoder[last].special


def test_ends_are_marked_in_a_tokenizer_of_transformers_reader() -> None:
    inner = Tokenizer(models.BPE(vocab={"a": 0, "<": 1, "eos": 2, ">": 3, "<eos>": 4}, merges=[]))
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner)
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "<", "eos", ">", "<eos>"],
    }
    complete_tokenizer(theirs, fields | {"tokenizer.ggml.token_type": [1] * 5})
    assert theirs("a<eos>").input_ids == [0, 4] and len(theirs) == 5
    assert theirs.decode([0, 4], skip_special_tokens=True) == "a"
