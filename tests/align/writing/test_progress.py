"""Lines report finished rows, never more than are asked for."""

from __future__ import annotations

import pytest

from align.writing import progress as module
from align.writing.progress import WritingProgress


def test_lines_count_finished_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINE_EVERY", 0.0)
    with WritingProgress(10, 2, quiet=False, longest=20) as progress:
        progress.count(30)
        progress.count(0, 3)
        progress.samples_done(6, 4)
        progress.count(5, 9)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2/10 samples, ") and lines[0].endswith(", at most 1 min left")
    assert lines[1].startswith("5/10 samples, ") and lines[1].endswith(" min left")
    assert any(line.endswith("for the other 4 samples") for line in lines)
    assert any(line.startswith("10/10 samples") for line in lines)
