"""Prompts from files and data sets; near duplicates are left out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from align.common.errors import UserError
from align.common.hub import hub_reachable
from align.data import prompts
from align.rows.conversation import Conversation
from decode.suites.sources import load_prompts_file
from tests.row_shapes import SHAPES, UNUSABLE


def read_prompts(*source: str | None) -> list[str | None]:
    """The prompts that are a user's text alone, as that text."""
    return [conversation.text for conversation in prompts.read_prompts(*source)]


def test_prompts_from_files(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        '{"prompt": "a"}\n{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]}\n'
    )
    with pytest.raises(UserError, match="no column 'promt'.*did you mean 'prompt'"):
        read_prompts(str(path), "train", "promt")
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert read_prompts(str(path), "train", "prompt") == ["a", "b"]
    for name, says in [
        ("none.jsonl", "no such file"),
        ("no/such/id", "no such file"),
        ("x.txt", "no such file"),
    ]:
        with pytest.raises(UserError, match=says):
            read_prompts(name if name.count("/") else str(tmp_path / name), "train", "prompt")
    for text, says in [
        ("not json\n", "line 1: not JSON"),
        ("null\n", "expected a list of rows or an object"),
        ("null\nnull\n", "no row holds a prompt .2 that are no text and no object but NoneType"),
        ("", "no rows"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError, match=says):
            read_prompts(str(path), "train", "prompt")
    (tmp_path / "p.json").write_text("null")
    with pytest.raises(UserError, match="expected a list of rows"):
        read_prompts(str(tmp_path / "p.json"), "train", "prompt")
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    assert read_prompts(str(tmp_path / "p.txt"), "train", "prompt") == ["one", "two"]


def test_columns_are_those_of_the_command_s_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`decode.eval --prompts` reads the same file alike: of each row the first column that holds something."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a", "id": 1}\n{"prompt": "b", "text": "c"}\n{"prompt": "", "question": "d"}\n')
    assert read_prompts(str(path), "train", None) == ["a", "b", "d"]
    assert [p.content for p in load_prompts_file(path).prompts] == ["a", "b", "d"]
    path.write_text('{"prompt": "a"}\n{"promt": "b"}\n{"prompt": ""}\n')
    capsys.readouterr()
    assert read_prompts(str(path), "train", None) == ["a"]
    assert "p.jsonl': 2 of 3 rows skipped (2 without a user's text)" in capsys.readouterr().err
    path.write_text('{"promt": "a"}\n')
    with pytest.raises(
        UserError, match="no prompt among its columns .promt. .did you mean data.prompts_column=promt"
    ):
        read_prompts(str(path), "train", None)
    path.write_text('{"prompt": 3}\n')
    with pytest.raises(
        UserError, match="no row holds a prompt .1 without a user's text.; its columns: prompt"
    ):
        read_prompts(str(path), "train", None)


def test_a_name_is_no_pattern(tmp_path: Path) -> None:
    (tmp_path / "p[1].jsonl").write_text('{"prompt": "mine"}\n')
    (tmp_path / "p1.jsonl").write_text('{"prompt": "another"}\n')
    assert read_prompts(str(tmp_path / "p[1].jsonl"), "train", "prompt") == ["mine"]


def test_a_data_set_of_several_configurations(tmp_path: Path) -> None:
    """As cnn_dailymail has them on the hub: without a name the line says which there are, and the key."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": f"Tell me {name}."}) + "\n")
    configs = "".join(f"- config_name: {n}\n  data_files: {n}.jsonl\n" for n in ("one", "two"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    with pytest.raises(UserError, match=r"one.*two.*\(data.prompts_config\)"):
        read_prompts(str(tmp_path), "train", "text")
    assert read_prompts(str(tmp_path), "train", "text", "two") == ["Tell me two."]


def test_a_folder_is_read_by_our_own_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` crashes the interpreter on a JSON file that holds `null`, and takes names for patterns."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    mixed = tmp_path / "mixed[1].v2"
    (mixed / "data").mkdir(parents=True)
    for name, text in (("train-0", "a"), ("train-1", "b"), ("test-0", "c")):
        (mixed / f"data/{name}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
    assert read_prompts(str(mixed), "train", "prompt") == ["a", "b"]
    assert read_prompts(str(mixed), "test", "prompt") == ["c"]
    files = [{"split": "train", "path": "data/test-*"}, {"split": "test", "path": "data/train-1.jsonl"}]
    card = {"configs": [{"config_name": "default", "data_files": files}]}
    (mixed / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n# A card\n")
    assert read_prompts(str(mixed), "train", "prompt") == ["c"]
    with pytest.raises(UserError, match="data.prompts_split='tset': unknown .did you mean 'test'"):
        read_prompts(str(mixed), "tset", "prompt")
    (mixed / "README.md").write_text((mixed / "README.md").read_text().replace("data/test-*", "../*"))
    with pytest.raises(UserError, match="README.md: data_files: '../.' is outside of the folder"):
        read_prompts(str(mixed), "train", "prompt")
    for name, text, says in (
        ("null", "null", "expected a list of rows"),
        ("rows", "[null]", "no row holds a prompt"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.json").write_text(text)
        with pytest.raises(UserError, match=says):
            read_prompts(str(tmp_path / name), "train", "prompt")
    (tmp_path / "null/p.json").rename(tmp_path / "null/test.json")
    with pytest.raises(UserError, match="no split 'train'"):
        read_prompts(str(tmp_path / "null"), "train", "prompt")
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/p.txt").write_text("one\ntwo\n")
    assert read_prompts(str(tmp_path / "lines"), "train", "prompt") == ["one", "two"]


def test_a_data_set_that_is_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "lm1b"
    folder.mkdir()
    (folder / "lm1b.py").write_text("raise SystemExit('never run')\n")
    with pytest.raises(UserError, match="prompts_revision=refs/convert/parquet"):
        read_prompts(str(folder), "train", "text")


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
    path.write_text('{"body": "a", "prompt": "b"}\n')
    assert read_prompts(str(path), "train", "body") == ["a"]
    assert [p.content for p in load_prompts_file(path, column="body").prompts] == ["a"]


def test_conversations_out_of_parquet(tmp_path: Path) -> None:
    """Its columns have one type: of a mix of schemas the absent keys are null."""
    both = [{"from": "human", "value": "Hi", "role": None, "content": None}]
    other = [{"from": None, "value": None, "role": "user", "content": "you"}]
    table = pyarrow.Table.from_pylist([{"messages": both}, {"messages": other}])
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet"), "train", None) == ["Hi", "you"]
    table = pyarrow.table({"messages": [json.dumps(both), json.dumps(other)]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert read_prompts(str(tmp_path / "p.parquet"), "train", None) == ["Hi", "you"]


def test_offline_a_data_set_comes_out_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_a_json_file_of_splits_gives_the_wanted_one(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps({"test": [{"prompt": "t"}], "train": [{"prompt": "a"}]}))
    assert read_prompts(str(path), "train", None) == ["a"] and read_prompts(str(path), "test", None) == ["t"]


@pytest.mark.parametrize("name", ["p", "p.xlsx", "p.jsonl.zip"])
def test_a_file_of_an_unknown_kind(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(UserError, match=r"unknown kind of file \((did you mean|one of)"):
        read_prompts(str(tmp_path / name), "train", None)


def test_what_a_json_file_holds_beside_its_split_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "several.json"
    rows = [{"prompt": "a"}]
    path.write_text(json.dumps({"train": rows, "extra": rows, "sft": rows}))
    assert read_prompts(str(path), "train", None) == ["a"]
    assert (
        "not used: extra (1 row), sft (1 row) (data.prompts_split chooses the key)" in capsys.readouterr().err
    )
    path.write_text(json.dumps({"system": "GLOBAL", "data": rows}))
    assert [p.content for p in load_prompts_file(path).prompts] == ["a"]
    assert "reads the rows under 'data'; not used: system\n" in capsys.readouterr().err
