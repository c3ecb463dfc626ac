"""Of two records of one generation the later counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.evaluation.records import append, read_records
from specalign.common.errors import UserError
from tests.measurements import fill_report as fill
from tests.measurements import record


def test_later_records_of_the_same_generation_count(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    append(folder, [record("plain", "p0", 99.0, 20, 20)])
    records = read_records(folder)
    assert len(records) == 18 and records[0].seconds == 99.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"new_tokens": 0}, "new_tokens=0, but tokens holds 21"),
        ({"committed": 21}, "committed=21 can't be"),
        ({"accepted": [3], "drafted": [2]}, "accepted exceeds drafted"),
        ({"accepted": [1], "drafted": []}, "differ in their number of calls"),
        ({"seconds": -1.0}, "must lie between 0"),
    ],
)
def test_a_record_of_no_generation_is_refused_with_its_line(
    tmp_path: Path, change: dict[str, Any], why: str
) -> None:
    append(
        tmp_path,
        [
            record("plain", "p0", 99.0, 20, 20),
            replace(record("plain", "p1", 1.0, 20, 20), **change),
        ],
    )
    with pytest.raises(UserError, match=rf"records\.jsonl, line 2: .*{why}"):
        read_records(tmp_path)
