"""Lines report finished rows, never more than are asked for."""

from __future__ import annotations

import pytest

from align.writing import progress as module
from align.writing.progress import WritingProgress


def test_lines_count_finished_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    progress = WritingProgress(10, 2, quiet=False)
    progress.count(30)
    progress.count(0, 3)
    progress.save(6, 4)
    progress.count(5, 9)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[:3]] == ["2/10", "5/10", "10/10"]
    assert lines[1].endswith(" min left")
