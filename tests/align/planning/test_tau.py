"""The fit of τ over tokens, and what it rests on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from align.planning.tau import expected_tau, measured, t_quantile

ROOT = Path(__file__).resolve().parents[3]


def test_every_run_stands_where_its_source_says() -> None:
    """No number is typed from memory: each figure is in the page that is named."""
    for run in measured()["runs"]:
        page = (ROOT / re.split(r"[,:]", run["source"])[0]).read_text(encoding="utf-8")
        for how in {"greedy", "sampling"} & run.keys():
            assert f"{run[how]:.3f}" in page, run
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "1,300 steps, 605,554 text tokens" in page
    assert measured()["tokens_per_row"] == pytest.approx(605_554 / 1300, abs=0.05)


def test_more_tokens_more_tau_in_a_band_that_holds_the_runs() -> None:
    rows = measured()["tokens_per_row"]
    inside = 0
    for run in measured()["runs"]:
        found = expected_tau(run["kind"], run["rows"] * rows, 4)
        assert found is not None and 1 < found.low < found.value < found.high
        inside += found.low <= run["sampling"] <= found.high
    assert inside >= len(measured()["runs"]) - 1
    few, many = (expected_tau("block", n, 4, "greedy") for n in (1e5, 1e6))
    assert few is not None and many is not None and few.value < many.value


def test_a_guess_is_called_one() -> None:
    near = expected_tau("block", 5e5, 4, target=measured()["target"])
    far = expected_tau("block", 1e9, 4, target="other/model")
    assert near is not None and near.guess == ""
    assert far is not None and "as its target" in far.guess and "30M tokens" in far.guess
    assert far.high <= 5 and far.value == expected_tau("block", 1e8, 4).value  # type: ignore[union-attr]
    assert expected_tau("ddit", 1e6, 8, "greedy") is None and expected_tau("block", 0, 4) is None


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182446), (10, 2.228139), (120, 1.979930)])
def test_students_t(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-3)
