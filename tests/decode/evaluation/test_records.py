"""Of two records of one generation the later counts."""

from __future__ import annotations

from pathlib import Path

from decode.evaluation.records import append, read_records
from tests.measurements import fill_report as fill
from tests.measurements import record


def test_later_records_of_the_same_generation_count(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    append(folder, [record("plain", "p0", 99.0, 20, 20)])
    records = read_records(folder)
    assert len(records) == 18 and records[0].seconds == 99.0
