"""A tokenizer that was made out of a GGUF file is opened as it was written, whatever class its architecture has on the hub."""

from __future__ import annotations

import json
from pathlib import Path

from align.common.checksums import write_checksums
from align.folder.tokenizer import open_tokenizer
from align.gguf.tokenizer import make_tokenizer
from tests.target_models import piece_fields


def test_a_made_folder_is_opened_as_written_and_another_as_transformers_does(tmp_path: Path) -> None:
    made = make_tokenizer(piece_fields(), tmp_path)
    made.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert type(open_tokenizer(tmp_path)).__name__ == "Qwen2Tokenizer"
    write_checksums(tmp_path, "*")
    opened, text = open_tokenizer(tmp_path), "<s>the hello\n<think> 😀"
    assert (
        opened(text).input_ids == made(text).input_ids and opened.decode(opened("ab").input_ids) == "<s> ab"
    )
