"""Grids and draws."""

from __future__ import annotations

import math
import random

import pytest

from align.common.errors import UserError
from align.sweeping.config import Parameter, Sweep
from align.sweeping.trials import draw, trials


def sweep(*parameters: Parameter, method: str = "grid", cap: int | None = None) -> Sweep:
    return Sweep("s", method, "m", True, parameters, (), (), cap)


TWO = (Parameter("a", (1, 2)), Parameter("b", ("x", "y", "z")))


def test_a_grid_is_every_combination_in_order() -> None:
    found = trials(sweep(*TWO), None, 0)
    assert [t.words for t in found] == [[f"a={a}", f"b={b}"] for a in (1, 2) for b in "xyz"]
    assert [t.name for t in found] == [f"{i:04d}" for i in range(6)]
    assert trials(sweep(*TWO), 4, 0) == found[:4] == trials(sweep(*TWO, cap=4), None, 0)


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    few, many = (trials(sweep(*TWO, method="random"), n, 7) for n in (3, 20))
    assert many[:3] == few and len(many) == 20
    assert trials(sweep(*TWO, method="random"), 20, 8) != many
    assert {v for t in many for _, v in t.values} == {1, 2, "x", "y", "z"}
    assert len(trials(sweep(*TWO), None, 0, "random")) == 10


def test_a_grid_over_a_range_or_without_end_is_refused() -> None:
    with pytest.raises(UserError, match="--method random"):
        trials(sweep(Parameter("r", distribution="uniform", high=1.0)), None, 0)
    with pytest.raises(UserError, match="1000000 trials"):
        trials(sweep(*(Parameter(n, tuple(range(100))) for n in "abc")), None, 0)
    with pytest.raises(UserError, match="10000000000 trials; at most"):
        trials(sweep(Parameter("r", distribution="uniform", high=1.0)), 10**10, 0, "random")


@pytest.mark.parametrize(
    ("parameter", "fits"),
    [
        (Parameter("p", (1, 2), (0.0, 1.0)), lambda v: v == 2),
        (Parameter("p", (), (), "uniform", 2, 3), lambda v: 2 <= v <= 3),
        (Parameter("p", (), (), "int_uniform", 2, 4), lambda v: v in (2, 3, 4)),
        (Parameter("p", (), (), "q_uniform", 0, 1, 0.25), lambda v: v in (0, 0.25, 0.5, 0.75, 1)),
        (Parameter("p", (), (), "log_uniform_values", 1e-4, 1e-2), lambda v: 1e-4 <= v <= 1e-2),
        (Parameter("p", (), (), "normal", 5, 0), lambda v: v == 5),
    ],
)
def test_draws_follow_their_distribution(parameter: Parameter, fits) -> None:
    assert all(fits(draw(parameter, random.Random(i))) for i in range(50))


def test_a_logarithmic_draw_is_even_over_magnitudes() -> None:
    values = [
        draw(Parameter("p", (), (), "log_uniform_values", 1e-4, 1.0), random.Random(i)) for i in range(2000)
    ]
    assert sum(v < 1e-2 for v in values) == pytest.approx(1000, abs=100) and math.isfinite(sum(values))
