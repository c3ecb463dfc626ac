"""JSON files in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.rows.json_forms import EVERY, find_rows, json_rows
from specalign.rows.splits import NoSplit

TWO = [{"prompt": "a"}, {"prompt": "b"}]
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(path: Path, text: str, under: str | None = None) -> list[Any]:
    path.write_text(text, encoding="utf-8")
    return list(json_rows(path, under))


LINES = "".join(json.dumps(row) + "\n" for row in TWO)


@pytest.mark.parametrize("name", ["f.json", "f.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        LINES,
        LINES.replace("\n", "\r\n\r\n"),
        "\ufeff" + LINES,
        json.dumps(TWO),
        json.dumps(TWO, indent=2),
        json.dumps({"prompt": ["a", "b"]}, indent=2),
        json.dumps({"prompt": {"0": "a", "1": "b"}}, indent=2),
        json.dumps({"count": 2, "rows": TWO}, indent=2),
        json.dumps({"rows": {"1": TWO[0], "2": TWO[1]}}, indent=2),
    ],
)
def test_two_rows_in_every_form(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path / name, text) == TWO


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "a"},
        {"other": "a"},
        {"messages": TALK},
        {"messages": TALK, "tools": [{"type": "function"}]},
        {"conversations": [{"from": "human", "value": "a", "markdown": None}]},
        {"turns": ["a", "b"]},
        {"prompt": TALK, "completion": TALK[1:]},
        {"question": "a", "choices": [{"label": "A"}, {"label": "B"}]},
        {"dialogue": TALK, "id": 7},
    ],
)
def test_one_object_is_one_row(tmp_path: Path, row: dict[str, Any]) -> None:
    for text in (json.dumps(row), json.dumps(row, indent=2)):
        assert read(tmp_path / "f.json", text) == read(tmp_path / "f.jsonl", text) == [row]


def test_rows_under_several_keys_are_chosen_never_dropped() -> None:
    splits = {"test": [{"prompt": "t"}], "train": TWO}
    assert (
        find_rows(splits, "f", "train") == TWO and find_rows(splits, "f", "test") == splits["test"]
    )
    assert find_rows(splits, "f", EVERY) == [*splits["test"], *TWO]
    for under in (None, "validation"):
        with pytest.raises(UserError, match=r"f: holds rows under several keys \(test, train\)"):
            find_rows(splits, "f", under)


def test_rows_of_another_split_are_refused() -> None:
    for value in ({"test": TWO}, {"test": TWO, "version": 1}):
        with pytest.raises(NoSplit, match=r"f: no split 'train' \(one of: test\)"):
            find_rows(value, "f", "train")
        for under in ("test", None, EVERY):
            assert find_rows(value, "f", under) == TWO
    for key in ("train", "training", "cases"):
        assert find_rows({key: TWO}, "f", "train") == TWO


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    for text, says in (
        ('{"a": 1}\n{"a"\n', "f.jsonl, line 2: not JSON"),
        ('{"a" 1\n', "f.jsonl, line 1: not JSON .*column 6"),
    ):
        with pytest.raises(UserError, match=says):
            read(tmp_path / "f.jsonl", text)
    with pytest.raises(UserError, match="f.json, line 4: not JSON"):
        read(tmp_path / "f.json", '[\n{"a": 1},\n{"a"\n]')


def test_what_is_left_out_beside_the_rows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    splits = {"train": TWO, "extra": TWO[:1], "about": "x", "none": None}
    assert find_rows(splits, "f", "train", "data.prompts_split") == TWO
    assert (
        capsys.readouterr().err == "note: f: reads the rows under 'train'; not used: extra, about\n"
    )
    find_rows(splits, "g", "train")
    find_rows(splits, "g", EVERY)
    assert capsys.readouterr().err == ""
