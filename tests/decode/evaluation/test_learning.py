"""τ over training: the table's figures against sums by hand, the ratio of accepted tokens, the picture."""

from __future__ import annotations

import pytest

from decode.evaluation.learning import Milestone, curves, points, table
from decode.evaluation.records import Record
from tests.measurements import record

MILESTONES = [Milestone(recipe, tokens) for recipe in ("ours", "dflash") for tokens in (100, 2000)]


def measured() -> list[Record]:
    """Eight prompts: τ of 2 and 3 with one recipe, 1.5 and 2 with the other."""
    calls = {"ours@100": 10, "ours@2000": 6, "dflash@100": 12, "dflash@2000": 10}
    found = []
    for i in range(8):
        for method, count in calls.items():
            tokens = {"ours@100": 20, "ours@2000": 18, "dflash@100": 18, "dflash@2000": 20}[method]
            extra = i % 2 if tokens == 20 else 0
            calls_made = ([1] * count, [3] * count)
            found.append(
                record(method, f"p{i}", 1.0, tokens + extra, count, *calls_made, identical=True)
            )
    return found


def test_the_figures_are_the_records() -> None:
    records = measured()
    found = points(MILESTONES, records)
    assert [p.tau.value for p in found] == pytest.approx([2.05, 3.0, 1.5, 2.05])
    assert found[0].ratio is not None and found[0].ratio.value == pytest.approx(1.05 / 0.5)
    assert found[1].ratio is not None and found[1].ratio.value == pytest.approx(2 / 1.05)
    assert found[0].ratio.lo is not None and found[0].ratio.lo < 2.1 < found[0].ratio.hi  # type: ignore[operator]
    assert found[2].ratio is None and found[0].identical == "8/8"
    left_out = points([*MILESTONES, Milestone("dflash", 9)], records)
    assert [p.milestone for p in left_out] == MILESTONES
    text = table(found, {"ours": 9_200_000, "dflash": 8_000_000})
    rows = text.splitlines()[2:]
    assert rows[0].startswith("| 100 | ours | 9.20M | 2.050 [") and "| 2.100 [" in rows[0]
    assert [row.split(" | ")[1] for row in rows] == ["ours", "dflash", "ours", "dflash"]
    assert curves(found, "a · b").startswith(b"\x89PNG")
