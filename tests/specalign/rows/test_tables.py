"""Rows of local files of every kind; what is wrong with a file is said with its line."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from specalign.common.errors import UserError
from specalign.common.files import PACKED
from specalign.rows.splits import NoSplit
from specalign.rows.tables import EVERY, find_rows, json_rows
from specalign.rows.tables import read_rows as iterate

ROWS = [{"a": "x"}, {"a": "y"}]


def read_rows(path: Path) -> list[Any]:
    return list(iterate(path))


LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".txt"])
@pytest.mark.parametrize("packed", PACKED)
def test_every_packing(tmp_path: Path, kind: str, packed: str) -> None:
    """Two packed files that are joined are one."""
    text = {".csv": b"a\nx\ny\n", ".txt": b"x\ny\n"}.get(kind, LINES)
    pack = {".gz": gzip.compress, ".zst": _zstd}[packed]
    path = tmp_path / f"f{kind.upper()}{packed}"
    path.write_bytes(pack(text) + pack(text))
    assert read_rows(path) == (["x", "y"] if kind == ".txt" else ROWS) * 2


def _zstd(text: bytes) -> bytes:
    return bytes(pyarrow.Codec("zstd").compress(text, asbytes=True))


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("f.csv", "id;prompt\n1;hello, you\n", [{"id": "1", "prompt": "hello, you"}]),
        ("f.csv", "id\tprompt\n1\thello; you\n", [{"id": "1", "prompt": "hello; you"}]),
        ("f.csv", '"what; then",prompt\n1,hello\n', [{"what; then": "1", "prompt": "hello"}]),
        ("f.csv", "prompt\nhello, you; and you\n", [{"prompt": "hello, you; and you"}]),
        ("f.csv", 'prompt\n"hello, ""you""\r\n\r\nand you"\r\n', [{"prompt": 'hello, "you"\r\n\r\nand you'}]),
        ("f.csv", "\ufeffprompt,id\nx,1\n\ufeffprompt,id\ny,2\n", [{"prompt": "x", "id": "1"}, {"prompt": "y", "id": "2"}]),
        ("f.csv", "prompt\n" + "x" * 140_000 + "\n", [{"prompt": "x" * 140_000}]),
        ("f.tsv", "id\tprompt, whole\n1\thello, you\n", [{"id": "1", "prompt, whole": "hello, you"}]),
        ("f.tsv", '"prompt"\t"id"\r\n"a ""b""\tc"\t1\r\n', [{"prompt": 'a "b"\tc', "id": "1"}]),
        ("f.tsv", 'id\tprompt\n1\t"a\nb"\n2\tc\n', [{"id": "1", "prompt": "a\nb"}, {"id": "2", "prompt": "c"}]),
        ("f.txt", "\ufeffx\r\n\r\n\ufeffy", ["x", "y"]),
    ],
)  # fmt: skip
def test_delimiters_and_line_ends(tmp_path: Path, name: str, text: str, rows: list[Any]) -> None:
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(tmp_path / name) == rows


def test_arrow_streams_and_files(tmp_path: Path) -> None:
    """What `datasets` caches and saves."""
    table = pyarrow.Table.from_pylist(ROWS)
    for new in (pyarrow.ipc.new_stream, pyarrow.ipc.new_file):
        with new(tmp_path / "f.arrow", table.schema) as writer:
            writer.write_table(table)
        assert read_rows(tmp_path / "f.arrow") == ROWS


def test_parquet(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    assert read_rows(tmp_path / "f.parquet") == ROWS


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("f.json", "null", "expected a list of rows or an object, found NoneType"),
        ("f.json", '{"a": [{"b": 1}], "c": [{"d": 1}]}', r"rows under several keys \(a, c\)"),
        ("f.jsnl", "{}", "did you mean '.json"),
        ("f.tsv", 'id\tprompt\n2\t"Quote" at start\n', "line 2: invalid CSV"),
        ("f.csv", "a,b\n1,2,3\n", "line 2: 3 fields, but the header has 2"),
        ("f.parquet", "PAR", "not readable Parquet"),
        ("f.json.gz", "not packed", "can't be read"),
    ],
)
def test_broken_files_are_one_line(tmp_path: Path, name: str, text: str | bytes, says: str) -> None:
    (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(UserError, match=says):
        read_rows(tmp_path / name)


def test_json_lines_in_a_text_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    for text in ('{"prompt": "a"}\n\n{"prompt": "b"}\n', '\ufeff{"a": 1}'):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match="f.txt: contains JSON; rename it to .jsonl"):
            read_rows(path)
    path.write_text('[\n {"prompt": "a"}\n]\n')
    with pytest.raises(UserError, match="rename it to .json to"):
        read_rows(path)
    for text in ("12\n", "null\n", "{not JSON} but text\n", "[1] a footnote\n[2] another\n"):
        path.write_text(text)
        assert read_rows(path) == text.split("\n")[:-1]


TWO = [{"prompt": "a"}, {"prompt": "b"}]
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def read(path: Path, text: str, under: str | None = None) -> list[Any]:
    path.write_text(text, encoding="utf-8")
    return list(json_rows(path, under))


JSON_LINES = "".join(json.dumps(row) + "\n" for row in TWO)


@pytest.mark.parametrize("name", ["f.json", "f.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        JSON_LINES,
        JSON_LINES.replace("\n", "\r\n\r\n"),
        "\ufeff" + JSON_LINES,
        json.dumps(TWO),
        json.dumps(TWO, indent=2),
        json.dumps({"count": 2, "rows": TWO}, indent=2),
        json.dumps({"rows": {"1": TWO[0], "2": TWO[1]}}, indent=2),
    ],
)
def test_two_rows_in_every_form(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path / name, text) == TWO


@pytest.mark.parametrize(
    "row",
    [
        {"other": "a"},
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
    for under, rows in (("train", TWO), ("test", splits["test"]), (EVERY, [*splits["test"], *TWO])):
        assert find_rows(splits, "f", under) == rows
    for under in (None, "validation"):
        with pytest.raises(UserError, match=r"f: contains rows under several keys \(test, train\)"):
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


def test_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"a": 1}\n{}\nbroken\n')
    rows = json_rows(tmp_path / "f.jsonl")
    assert next(rows) == {"a": 1}
    with pytest.raises(UserError, match="line 3"):
        list(rows)


def test_what_is_left_out_beside_the_rows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    splits = {"train": TWO, "extra": TWO[:1], "about": "x", "none": None}
    assert find_rows(splits, "f", "train", "data.prompts_split") == TWO
    note = "note: f: reads the rows under 'train'; not used: extra, about\n"
    assert capsys.readouterr().err == note
    find_rows(splits, "g", "train")
    find_rows(splits, "g", EVERY)
    assert capsys.readouterr().err == ""
