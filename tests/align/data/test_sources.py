"""Documents in a fixed order from every kind of source; what is skipped is counted."""

import gzip
import json
from collections import Counter
from pathlib import Path

import datasets
import pytest

from align.config.data import DataConfig
from align.data.sources import read_documents as documents
from specalign.common.errors import UserError


def read(source: Path | str, data: DataConfig | None = None) -> tuple[list[str], dict[str, int]]:
    left_out = Counter[str]()
    found = list(documents(str(source), data or DataConfig(), left_out))
    return found, dict(+left_out)


def test_a_folder_of_tables_and_one_of_texts(tmp_path: Path) -> None:
    tables, texts = tmp_path / "tables", tmp_path / "texts"
    for folder in (tables, texts / ".git"):
        folder.mkdir(parents=True)
    with gzip.open(tables / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "three"}\n\n{"text": null}\n')
    (tables / "a.jsonl").write_text('{"text": "two"}\n')
    found, left_out = read(tables)
    assert found == ["two", "three"]
    assert left_out == {"rows without text in column 'text'": 1}
    (texts / "a.txt").write_text("one\n\ntwo")
    (texts / ".git" / "z.txt").write_text("hidden")
    (texts / "b.py").write_text("x = 1\n")
    (texts / "g.bin").write_bytes(b"\xff\xff")
    assert read(texts) == (["one\n\ntwo", "x = 1\n"], {"files that are not text": 1})
    assert read(texts / "b.py")[0] == ["x = 1\n"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"txt": "x"}\n', r"no column 'text' \(data.text_column\).*'txt'"),
        ("a.txt", b"\xff\xff", "is not UTF-8 text"),
        ("", b"", "no such file or folder"),
    ],
)
def test_wrong_sources_are_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / (name or "gone.txt")
    path.parent.mkdir(exist_ok=True)
    if name:
        path.write_bytes(content)
    with pytest.raises(UserError, match=says):
        read(path)


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(name: str, config: str | None, **options: object) -> object:
        asked.append((name, config, *options.values()))
        return [{"body": "one"}, {"body": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("specalign.rows.hub_rows.hub_reachable", lambda: True)
    options = DataConfig(text_column="body", text_config="en", text_revision="v1")
    assert read("owner/name", options)[0] == ["one", "two"]
    assert asked == [("owner/name", "en", "train", "v1", True)]
    with pytest.raises(UserError, match="data.text='owner/name': no column 'text'"):
        read("owner/name")


def test_rows_and_tables_without_the_column(tmp_path: Path) -> None:
    (tmp_path / "mix.jsonl").write_text('{"text": "first"}\n{"content": "second"}\n3\n"third"\n')
    expected = (["first", "third"], {"rows without text in column 'text'": 2})
    assert read(tmp_path / "mix.jsonl") == expected
    (tmp_path / "d").mkdir()
    (tmp_path / "d/a.jsonl").write_text('{"content": "second"}\n')
    (tmp_path / "d/b.jsonl").write_text('{"text": "first"}\n')
    with pytest.raises(UserError, match="a.jsonl': no column 'text'"):
        read(tmp_path / "d")


def test_what_other_columns_hold_is_counted(tmp_path: Path) -> None:
    rows = [{"id": 1, "text": "a", "title": "T", "tags": []}, {"text": "b", "title": "U"}]
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read(tmp_path / "a.jsonl") == (["a", "b"], {"values of column 'title'": 2})


def test_a_folder_gives_rows_of_one_split(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    assert read(tmp_path) == (["train.jsonl"], {})
    assert read(tmp_path, DataConfig(text_split="test")) == (["test.jsonl"], {})
