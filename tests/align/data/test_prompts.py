"""Prompts of a file."""

import json
from pathlib import Path

import pytest

from align.config.data import DataConfig
from align.data.sources import read_prompts
from specalign.rows.conversation import Conversation
from specalign.suites.sources import load_prompts_file
from tests.row_shapes import SHAPES, UNUSABLE


def test_both_read_one_conversation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of every shape in one file; the answers that end a conversation are no part of the prompt."""
    path = tmp_path / "p.jsonl"
    rows = [row for row, _ in (*SHAPES.values(), *UNUSABLE.values())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = [c.prompt for c in read_prompts(DataConfig(prompts=str(path)))]
    note = capsys.readouterr().err
    measured = [p.content for p in load_prompts_file(path).prompts]
    assert len(trained) == len(SHAPES) and note.count("\n") == 1
    own = note.replace("data.prompts=", "--prompts=")
    own = own.replace("data.prompts_column", "--prompts-column")
    assert capsys.readouterr().err == own
    for conversation, content in zip(trained, measured, strict=True):
        if isinstance(content, str):
            assert conversation == Conversation.from_text(content)
        elif isinstance(content, list):
            assert conversation == Conversation(tuple(content))
        else:
            assert conversation == content and content.tools
