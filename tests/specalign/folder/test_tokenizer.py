"""Which class opens a folder's tokenizer, and what stands in front of a text."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from specalign.common.checksums import write_checksums
from specalign.common.errors import UserError
from specalign.folder.tokenizer import first_ids, open_tokenizer, opening_ids
from specalign.gguf.tokenizer import make_tokenizer
from tests.tokenizers import sentencepiece


def test_a_made_folder_is_opened_as_written(tmp_path: Path) -> None:
    """Qwen2's class would split digits in its own way."""
    tokens = ["1", "2", "12", "<s>"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["1 2"],
    }
    made = make_tokenizer(fields)
    made.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert type(open_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"
    write_checksums(tmp_path, "*")
    assert open_tokenizer(tmp_path)("12").input_ids == made("12").input_ids == [2]


def _with_post_processor(single: str) -> Any:
    """Llama's kind of tokenizer that puts tokens around a text."""
    tokenizer = sentencepiece.__wrapped__()
    tokens = [("<s>", 1), ("</s>", 2)]
    core = tokenizer.backend_tokenizer
    core.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    return tokenizer


@pytest.mark.parametrize(
    ("single", "opening"),
    [
        ("$A", ()),
        ("<s> $A", (1,)),
        ("$A </s>", ()),
        ("<s> $A </s>", (1,)),
        ("<s> </s> $A </s>", (1, 2)),
    ],
)
def test_first_tokens_are_the_tokenizers(single: str, opening: tuple[int, ...]) -> None:
    tokenizer = _with_post_processor(single)
    assert opening_ids(tokenizer, 1000, "m") == opening
    text = [*opening, *tokenizer("The law", add_special_tokens=False)["input_ids"]]
    assert tokenizer("The law")["input_ids"][: len(text)] == text
    if opening:
        with pytest.raises(UserError, match="m: its tokenizer maps '<s>' to token 1, .* 1 rows"):
            opening_ids(tokenizer, 1, "m")


def test_a_whole_text_needs_a_first_token(capsys: pytest.CaptureFixture[str]) -> None:
    """The tokenizer's own; else BOS, or one that ends a text, and a note that names it once."""
    tokenizer = _with_post_processor("<s> $A </s>")
    assert first_ids(tokenizer, (2, 5), 1000, "m") == (1,) and not capsys.readouterr().err
    tokenizer = _with_post_processor("$A")
    for _ in range(2):
        assert first_ids(tokenizer, (2, 5), 1000, "m") == (1,)
    assert capsys.readouterr().err.count("m: the tokenizer adds no BOS token; training docu") == 1
    with pytest.raises(UserError, match="m: its tokenizer maps '<s>' to token 1, .* 1 rows"):
        first_ids(tokenizer, (2, 5), 1, "m")
    tokenizer.bos_token = None
    assert first_ids(tokenizer, (2, 5), 1000, "m") == (2,) and "'</s>'" in capsys.readouterr().err
    with pytest.raises(UserError, match="m: its files define neither a beginning-of-text nor"):
        first_ids(tokenizer, (), 1000, "m")
