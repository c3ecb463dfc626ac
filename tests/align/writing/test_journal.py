"""Finished rows outlast a kill; a torn or foreign line is none."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from align.writing.generation import Row
from align.writing.journal import Journal


def rows() -> list[Row]:
    return [Row(i, 0.0, [5], writes_prompt=False) for i in range(4, 8)]


def finished(index: int) -> Row:
    return Row(index, 0.0, [], False, tokens=[1, index, 2], answer_start=1, done=True, broken="" if index < 6 else "empty answer")  # fmt: skip


def kept(folder: Path) -> Journal:
    journal = Journal(folder, 100)
    for index in (6, 4):
        journal.add(1, finished(index))
    journal.close()
    return Journal(folder, 100)


def test_finished_rows_come_back(tmp_path: Path) -> None:
    again, journal = rows(), kept(tmp_path / "data")
    assert [row.index for row in journal.restore(1, again)] == [5, 7]
    assert (again[0].tokens, again[0].answer_start, again[0].done) == ([1, 4, 2], 1, True)
    assert again[2].broken == "empty answer" and not again[1].done


@pytest.mark.parametrize(
    "line",
    [
        b'{"row":5,"tok',
        b"\x00\x00\xff\n",
        b'{"row":5,"tokens":[1,200],"answer_start":1,"broken":""}\n',
        b'{"row":5,"tokens":[1],"answer_start":2,"broken":""}\n',
        b'{"row":5,"tokens":[1],"answer_start":1,"broken":""}',
        b'{"row":5,"tokens":[1,null],"answer_start":1,"broken":""}\n',
        b"[5]\n",
    ],
)
def test_a_line_that_is_not_whole_goes(tmp_path: Path, line: bytes) -> None:
    journal = kept(tmp_path)
    good = journal.path(1).read_bytes()
    journal.path(1).write_bytes(good + line)
    assert [row.index for row in journal.restore(1, rows())] == [5, 7]
    assert journal.path(1).read_bytes() == good
    journal.add(1, finished(5))
    journal.close()
    assert [row.index for row in Journal(tmp_path, 100).restore(1, rows())] == [7]


def test_what_is_a_shard_is_kept_no_longer(tmp_path: Path) -> None:
    journal = kept(tmp_path)
    journal.add(2, finished(8))
    journal.forget(1)
    assert [path.name for path in tmp_path.iterdir()] == [".answers-00002.jsonl"]
    journal.close()


def test_a_device_in_its_place_is_refused(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 100)
    journal.path(1).symlink_to("/dev/null")
    with pytest.raises(OSError, match=r"is no ordinary file.*answers-00001"):
        journal.restore(1, rows())


def test_a_disk_that_is_full_in_the_middle_of_a_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 100)
    journal._files[1] = cast(Any, SimpleNamespace(write=lambda line: len(line) - 1, close=lambda: None))
    with pytest.raises(OSError) as said:
        journal.add(1, finished(4))
    assert (said.value.errno, said.value.filename) == (errno.ENOSPC, str(journal.path(1)))
    journal.close()
