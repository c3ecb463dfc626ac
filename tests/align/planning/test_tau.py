"""The fit of τ over tokens, and what it rests on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from align.planning.tau import predict_tau, read_runs, t_quantile

ROOT = Path(__file__).resolve().parents[3]


def test_every_run_is_in_the_page_that_it_names() -> None:
    for run in read_runs()["runs"]:
        page = (ROOT / re.split(r"[,:]", run["source"])[0]).read_text(encoding="utf-8")
        for how in {"greedy", "sampling"} & run.keys():
            assert f"{run[how]:.3f}" in page, run
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "1,300 steps, 605,554 text tokens" in page
    assert read_runs()["tokens_per_row"] == pytest.approx(605_554 / 1300, abs=0.05)


def test_more_tokens_give_more_tau_in_a_band_that_holds_the_runs() -> None:
    rows, inside = read_runs()["tokens_per_row"], 0
    for run in read_runs()["runs"]:
        found = predict_tau(run["kind"], run["rows"] * rows, 4)
        assert found is not None and 1 < found.low < found.value < found.high
        inside += found.low <= run["sampling"] <= found.high
    assert inside >= len(read_runs()["runs"]) - 1
    few, many = (predict_tau("block", n, 4, "greedy") for n in (1e5, 1e6))
    assert few is not None and many is not None and few.value < many.value


def test_a_guess_is_called_one() -> None:
    near = predict_tau("block", 5e5, 4, target=read_runs()["target"])
    far, limit = predict_tau("block", 1e9, 4, target="other/model"), predict_tau("block", 1e8, 4)
    assert near is not None and far is not None and limit is not None
    assert near.guess == "" and "as its target" in far.guess and "30M tokens" not in near.guess
    assert far.high <= 5 and far.value == limit.value
    assert predict_tau("ddit", 1e6, 8, "greedy") is None and predict_tau("block", 0, 4) is None


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182446), (10, 2.228139), (120, 1.979930)])
def test_students_t(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, abs=1e-3)
