"""Finished rows outlast a kill; a torn line does not count."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.writing.journal import Journal
from align.writing.rows import Row


def unwritten_rows() -> list[Row]:
    return [Row(index, 0.0, [5], writes_prompt=False) for index in range(4, 8)]


def finished(index: int) -> Row:
    tokens = [1, index, 2]
    return Row(
        index, 0.0, [], False, tokens=tokens, answer_start=1, done=True, broken="x" * (index == 6)
    )


def write_journal(folder: Path) -> Journal:
    journal = Journal(folder)
    for index in (6, 4):
        journal.add(1, finished(index))
    journal.close()
    return Journal(folder)


@pytest.mark.parametrize(
    "torn", [b"", b'{"row":5,"tok', b"\x00\x00\xff\n", b'{"row":5,"tokens":[1],"answer_start":1,"broken":""}']
)  # fmt: skip
def test_finished_rows_are_restored_without_a_torn_line(tmp_path: Path, torn: bytes) -> None:
    journal = write_journal(tmp_path / "data")
    whole = journal.path(1).read_bytes()
    journal.path(1).write_bytes(whole + torn)
    rows = unwritten_rows()
    assert [row.index for row in journal.restore(1, rows)] == [5, 7]
    assert (rows[0].tokens, rows[0].answer_start, rows[0].done) == ([1, 4, 2], 1, True)
    assert rows[2].broken == "x" and not rows[1].done
    assert journal.path(1).read_bytes() == whole
    journal.add(1, finished(5))
    journal.close()
    assert [row.index for row in Journal(tmp_path / "data").restore(1, unwritten_rows())] == [7]


def test_rows_of_shards_are_removed(tmp_path: Path) -> None:
    journal = write_journal(tmp_path)
    journal.add(2, finished(8))
    journal.forget(1)
    assert [path.name for path in tmp_path.iterdir()] == [".answers-00002.jsonl"]
    journal.close()
