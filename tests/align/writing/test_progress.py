"""A line says how far the writing is; rows that are in no shard yet count, and no more than are asked for."""

from __future__ import annotations

import pytest

from align.writing import progress as module
from align.writing.progress import WritingProgress


def test_lines_count_finished_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    with WritingProgress(10, 2, quiet=False, longest=20) as found:
        found.count(30)
        found.count(0, 3)
        found.samples_done(6, 4)
        found.count(5, 9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2/10 samples, ") and lines[0].endswith(", at most 1 min left")
    assert lines[1].startswith("5/10 samples, ") and lines[1].endswith(" min left")
    assert any(line.endswith("for the other 4 samples") for line in lines)
    assert any(line.startswith("10/10 samples") for line in lines)


def test_quiet_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    with WritingProgress(4, 0, quiet=True) as found:
        found.count(1, 1)
        found.samples_done(2)
    assert capsys.readouterr().out == ""


def test_the_time_left_falls_between_two_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    with WritingProgress(10, 0, quiet=False, longest=20) as found:
        for minute, rows in ((10, 5), (13, 0), (18, 0), (22, 0)):
            clock[0] = 60.0 * minute
            found.count(10, rows)
    lines = capsys.readouterr().out.splitlines()
    left = [line.split(" tokens/s")[1] for line in lines if " samples, " in line]
    assert left == [", 10 min left", ", 7 min left", ", 2 min left", ""]
