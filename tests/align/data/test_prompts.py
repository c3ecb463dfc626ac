"""Prompts from files and data sets; near duplicates are left out."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from align.data import prompts
from specalign.common.hub import hub_reachable
from specalign.rows.conversation import Conversation
from specalign.suites.sources import load_prompts_file
from tests.row_shapes import SHAPES, UNUSABLE


def test_training_and_evaluation_read_the_same_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of every shape in one file; the answers that end a conversation are no part of the prompt."""
    path = tmp_path / "p.jsonl"
    rows = [row for row, _ in (*SHAPES.values(), *UNUSABLE.values())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = [c.prompt for c in prompts.read_prompts(str(path), "train", None)]
    note = capsys.readouterr().err
    measured = [p.content for p in load_prompts_file(path).prompts]
    assert len(trained) == len(SHAPES) and note.count("\n") == 1
    assert capsys.readouterr().err == note.replace("data.prompts=", "--prompts=").replace(
        "data.prompts_column", "--prompts-column"
    )
    for conversation, content in zip(trained, measured, strict=True):
        if isinstance(content, str):
            assert conversation == Conversation.from_text(content)
        elif isinstance(content, list):
            assert conversation == Conversation(tuple(content))
        else:
            assert conversation == content and content.tools


def test_offline_a_data_set_comes_out_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub_reachable.cache_clear()
    asked = []

    def load(name: str, config: str | None, **options: object) -> object:
        asked.append((name, config, options))
        return datasets.Dataset.from_dict({"prompt": ["a"]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = prompts.read_prompts("owner/cached", "train[:1]", None, "en")
    assert [conversation.text for conversation in found] == ["a"]
    assert asked == [
        ("owner/cached", "en", {"split": "train[:1]", "revision": None, "streaming": False})
    ]
    hub_reachable.cache_clear()
