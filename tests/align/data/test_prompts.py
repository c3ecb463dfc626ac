"""Prompts from files and data sets; near duplicates are left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.data.prompts import NearDuplicates, read_prompts


def test_near_duplicates() -> None:
    seen = NearDuplicates(0.8)
    assert seen.add(list(range(30)))
    assert not seen.add(list(range(30)))
    assert not seen.add([*range(29), 99])
    assert seen.add(list(range(15)) + list(range(50, 65)))
    assert seen.add([1]) and not seen.add([1]) and seen.add([2])


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
        ("null\n", "row 1: expected an object"),
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


def test_a_data_set_that_is_a_script(tmp_path: Path) -> None:
    folder = tmp_path / "lm1b"
    folder.mkdir()
    (folder / "lm1b.py").write_text("raise SystemExit('never run')\n")
    with pytest.raises(UserError, match="prompts_revision=refs/convert/parquet"):
        read_prompts(str(folder), "train", "text")
