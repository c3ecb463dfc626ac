"""Files of a data set in a folder: by its card, by names, of one kind."""

import json
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.rows.folders import suite_files, table_files
from specalign.rows.splits import NoSplit


def make(folder: Path, *names: str, configs: Any = None) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"prompt": "a"}\n')
    if configs is not None:
        (folder / "README.md").write_text(f"---\n{json.dumps({'configs': configs})}\n---\n")
    return folder


def choose(folder: Path, split: str = "train", config: str | None = None) -> list[str]:
    found = table_files(folder, split, config, "data.prompts")
    return [file.relative_to(folder).as_posix() for file in found]


def test_by_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("train-0.jsonl", "train-1.jsonl", "test-0.jsonl", ".hidden/train.jsonl")
    folder = make(tmp_path / "d", *names)
    assert choose(folder) == ["train-0.jsonl", "train-1.jsonl"]
    assert choose(folder, "test") == ["test-0.jsonl"]
    assert "skipped: test-0.jsonl (data.prompts_split)" in capsys.readouterr().err
    assert choose(make(tmp_path / "restrained", "latest.jsonl")) == ["latest.jsonl"]
    with pytest.raises(NoSplit, match=r"no split 'validation' \(one of: test, train\)"):
        choose(folder, "validation")


def test_one_kind_of_file_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(tmp_path, "raw/train.jsonl", "data/train-0.parquet", "test.parquet", "notes.txt")
    assert choose(folder) == ["data/train-0.parquet"]
    note = "skipped: notes.txt, raw/train.jsonl, test.parquet (data.prompts_split)"
    assert note in capsys.readouterr().err
    with pytest.raises(UserError, match="the same data file format for all splits"):
        choose(make(tmp_path / "several", "train.jsonl", "test.parquet"))


def test_a_card_says_what_no_name_tells(tmp_path: Path) -> None:
    files = [{"split": "train", "path": "a*"}, {"split": "test", "path": "held_out.jsonl"}]
    card = [{"config_name": "default", "data_files": files}]
    folder = make(tmp_path, "a.jsonl", "held_out.jsonl", configs=card)
    assert choose(folder) == ["a.jsonl"] and choose(folder, "test") == ["held_out.jsonl"]
    card = [{"config_name": n, "data_dir": n} for n in ("de", "en")]
    names = ("de/train.jsonl", "en/train.jsonl", "en/test.jsonl")
    folder = make(tmp_path / "two", *names, configs=card)
    assert choose(folder, config="en") == ["en/train.jsonl"]
    for config in (None, "fr"):
        with pytest.raises(UserError, match=r"'de', 'en'\].*\(data.prompts_config\)"):
            choose(folder, config=config)


def test_a_suites_copy_may_be_a_part(tmp_path: Path) -> None:
    def files(*names: str) -> list[str]:
        folder = make(tmp_path / names[0].replace("/", "_"), *names)
        found = suite_files(folder, "test", "main", "suite")
        return [file.relative_to(folder).as_posix() for file in found]

    assert files("main/test.jsonl", "main/train.jsonl", "other/test.jsonl") == ["main/test.jsonl"]
    assert files("question.jsonl", "train.jsonl") == ["question.jsonl"]
    with pytest.raises(NoSplit, match="suite: no split 'test'"):
        files("train.jsonl")
