"""Making a report again changes nothing."""

from __future__ import annotations

from pathlib import Path

from decode.reporting.render import make_report
from tests.measurements import fill_report as fill


def test_remaking_changes_nothing(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    names = ("summary.json", "report.html", "report.png")
    make_report(folder)
    first = [(folder / name).read_bytes() for name in names]
    make_report(folder)
    assert [(folder / name).read_bytes() for name in names] == first
