"""τ over training: the table's figures against sums by hand, the ratio of accepted tokens, the picture."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from decode.evaluation.learning import Milestone, Point, curves, points, table
from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate, accepted_ratio, counts
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
            found.append(
                record(
                    method,
                    f"p{i}",
                    1.0,
                    tokens + extra,
                    count,
                    [1] * count,
                    [3] * count,
                    identical=True,
                )
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


def test_a_baseline_that_gets_nothing_accepted_has_no_ratio() -> None:
    none = {("s", f"p{i}"): (10, 10) for i in range(6)}
    some = counts(measured(), "ours@100")
    some = {("s", prompt): value for (_, prompt), value in some.items()}
    assert accepted_ratio(none, some) is None
    seldom = {**none, ("s", "p0"): (11, 10)}
    ratio = accepted_ratio(seldom, some)
    assert (
        ratio is not None and ratio.value > 10 and ratio.hi is None
    )  # resamples without p0 have none


def test_the_axis_says_how_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In words that are no formula, at the milestones."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    sizes = (1500, 250_000, 1_000_000, 2_500_000_000)
    curves([Point(Milestone("ours", n), Estimate(1.5, 1.4, 1.6, 20), "", None) for n in sizes], "x")
    (axes,) = drawn[0].axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1.5k", "250k", "1M", "2.5G"]
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))
