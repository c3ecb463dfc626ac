"""Prompts from files and data sets; near duplicates are left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import pytest

from align.data import prompts
from specalign.common.errors import UserError
from specalign.common.hub import hub_reachable
from specalign.rows.conversation import Conversation
from specalign.suites.sources import load_prompts_file
from tests.row_shapes import SHAPES, UNUSABLE


def read_prompts(*source: str | None) -> list[str | None]:
    """The prompts that are a user's text alone, as that text."""
    return [conversation.text for conversation in prompts.read_prompts(*source)]


def test_a_folder_is_read_by_our_own_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` crashes the interpreter on a JSON file that holds `null`, and takes names for patterns."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    mixed = tmp_path / "mixed[1].v2"
    (mixed / "data").mkdir(parents=True)
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test-0", "c")):
        (mixed / f"data/{name}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    assert read_prompts(str(mixed), "train", "prompt") == ["a", "b"]
    assert read_prompts(str(mixed), "test", "prompt") == ["c"]
    files = [
        {"split": "train", "path": "data/test-*"},
        {"split": "test", "path": "data/train-1.jsonl"},
    ]
    card = {"configs": [{"config_name": "default", "data_files": files}]}
    (mixed / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n# A card\n")
    assert read_prompts(str(mixed), "train", "prompt") == ["c"]
    with pytest.raises(UserError, match="data.prompts_split='tset': unknown .did you mean 'test'"):
        read_prompts(str(mixed), "tset", "prompt")


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
    assert read_prompts("owner/cached", "train[:1]", None, "en") == ["a"]
    assert asked == [("owner/cached", "en", {"split": "train[:1]"})]
    hub_reachable.cache_clear()
