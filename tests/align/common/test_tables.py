"""Rows of local files of every kind; what is wrong with a file is said with its line."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from align.common import files, tables
from align.common.errors import UserError
from align.common.tables import read_rows, read_text

ROWS = [{"a": "x"}, {"a": "y"}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("f.jsonl", '{"a": "x"}\n\n{"a": "y"}\n'),
        ("f.json", '[{"a": "x"}, {"a": "y"}]'),
        ("keyed.json", '{"version": 1, "cases": [{"a": "x"}, {"a": "y"}]}'),
        ("named.json", '{"problems": {"1": {"a": "x"}, "2": {"a": "y"}}}'),
        ("f.csv", "a\nx\ny\n"),
    ],
)
def test_rows_of_every_kind_of_file(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text("\ufeff" + text)
    assert read_rows(path) == ROWS
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    assert read_rows(packed) == ROWS


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    assert read_rows(tmp_path / "f.parquet") == ROWS


@pytest.mark.parametrize(("rows", "text"), [(1_000_000, "x"), (2000, "x" * 2000)])
def test_parquet_that_repeats_is_larger_than_its_file(
    rows: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million short rows, or two thousand long ones, in a few bytes."""
    pyarrow = pytest.importorskip("pyarrow")
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, "int32"), [text])
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "f.parquet")
    assert (tmp_path / "f.parquet").stat().st_size < 20_000
    monkeypatch.setattr(tables, "memory_bytes", lambda: 4 * 2**20)
    with pytest.raises(UserError, match=f"its {rows:,} rows take more than"):
        read_rows(tmp_path / "f.parquet")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("f.jsonl", '{"a": 1}\n{"a": }\n', "line 2: not JSON"),
        ("f.json", '{"a": 1}', "expected a list of rows"),
        ("f.txt", "\n \n", "holds no rows"),
        ("f.jsnl", "{}", "did you mean '.json"),
        ("f.parquet", "PAR", "not readable Parquet"),
        ("f.json.gz", "not packed", "can't be read"),
        ("f.json.gz", gzip.compress(b"[1]", mtime=0)[:-9], "can't be read"),
        ("f.json.gz", gzip.compress(b"[1]", mtime=0)[:10] + b"\xff" * 20, "can't be read"),
        ("f.jsonl.gz", gzip.compress(b" " * 2000, mtime=0), "more than 0 MiB, or without end"),
    ],
)
def test_broken_files_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | bytes, says: str
) -> None:
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=says):
        read_rows(tmp_path / name)


def test_values_that_python_has_not_are_one_line(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bytes_ = pyarrow.array([b"\xff\xff"], pyarrow.binary())
    no_text = pyarrow.StringArray.from_buffers(1, *bytes_.buffers()[1:])
    for column in (no_text, pyarrow.array([1 << 30], pyarrow.date32())):
        parquet.write_table(pyarrow.table({"prompt": ["x"], "other": column}), tmp_path / "f.parquet")
        with pytest.raises(UserError, match="not readable Parquet"):
            read_rows(tmp_path / "f.parquet")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f.txt")
    with pytest.raises(UserError, match=r"no ordinary file"):
        read_text(tmp_path / "f.txt")
