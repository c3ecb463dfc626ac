"""Grids and draws."""

from __future__ import annotations

import random

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe
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
    assert len(trials(sweep(*TWO, method="random"), None, 0)) == 10


def test_a_grid_over_a_range_or_without_end_is_refused() -> None:
    for parameter in (Parameter("r", distribution="uniform", high=1.0), Parameter("r", (1, 2), (0.5, 0.5))):
        with pytest.raises(UserError, match="--method random"):
            trials(sweep(parameter), None, 0)
    with pytest.raises(UserError, match="a grid of 100001 values for r"):
        trials(sweep(Parameter("r", (), (), "int_uniform", 0, 100_000)), None, 0)
    with pytest.raises(UserError, match="1000000 trials"):
        trials(sweep(*(Parameter(n, tuple(range(100))) for n in "abc")), None, 0)
    with pytest.raises(UserError, match="10000000000 trials; at most"):
        trials(sweep(Parameter("r", distribution="uniform", high=1.0), method="random"), 10**10, 0)


WANDB = {
    "uniform": ({"low": 2.0, "high": 3.0}, (2.1, 2.5, 2.9)),
    "int_uniform": ({"low": 2, "high": 8}, (2, 5, 8)),
    "q_uniform": ({"low": 2, "high": 8, "step": 2}, (2, 4, 8)),
    "log_uniform_values": ({"low": 1e-4, "high": 1e-2}, (0.000158489, 0.001, 0.00630957)),
    "q_log_uniform_values": ({"low": 1e-4, "high": 1e-2, "step": 1e-4}, (0.0002, 0.001, 0.0063)),
    "inv_log_uniform_values": ({"low": 1e-4, "high": 1e-2}, (0.000158489, 0.001, 0.00630957)),
    "normal": ({"low": 5, "high": 2}, (2.4369, 5.0, 7.5631)),
    "q_normal": ({"low": 5, "high": 2, "step": 0.5}, (2.5, 5.0, 7.5)),
    "log_normal": ({"low": -7, "high": 1}, (0.000253144, 0.000911882, 0.0032848)),
    "q_log_normal": ({"low": 2, "high": 1, "step": 1}, (2, 7, 27)),
    "beta": ({"low": 2, "high": 5}, (0.0925953, 0.26445, 0.510316)),
    "q_beta": ({"low": 2, "high": 5, "step": 0.05}, (0.1, 0.25, 0.5)),
}  # fmt: skip
"""For each distribution the 10%, 50% and 90% quantile that W&B's sweeps 0.3.0 computes (HyperParameter.ppf)."""


@pytest.mark.parametrize("kind", WANDB)
def test_draws_have_the_quantiles_of_wandbs(kind: str) -> None:
    """A share of draws at or below each quantile of theirs that fits it; type and multiples as theirs."""
    numbers, quantiles = WANDB[kind]
    parameter = Parameter("p", distribution=kind, **numbers)
    values = [draw(parameter, random.Random(i)) for i in range(2000)]
    for share, quantile in zip((0.1, 0.5, 0.9), quantiles, strict=True):
        below = sum(value < quantile * 0.9999 for value in values) / 2000
        upto = sum(value <= quantile * 1.0001 for value in values) / 2000
        assert below - 0.04 <= share <= upto + 0.04
    assert {type(value) for value in values} == {type(quantiles[0])}


def test_multiples_of_q_are_written_as_such() -> None:
    parameter = Parameter("p", (), (), "q_log_uniform_values", 1e-4, 1e-3, 1e-4)
    found = {repr(draw(parameter, random.Random(i))) for i in range(300)}
    assert found == {repr(float(f"{i}e-4")) for i in range(1, 11)}


def test_weights_are_kept() -> None:
    assert {draw(Parameter("p", (1, 2), (0.0, 1.0)), random.Random(i)) for i in range(50)} == {2}


def test_a_grid_goes_through_ranges_of_whole_steps_as_wandbs() -> None:
    parameters = (
        Parameter("a", (), (), "int_uniform", 2, 4),
        Parameter("b", (), (), "q_uniform", 0, 1, 0.25),
    )
    found = trials(sweep(*parameters), None, 0)
    assert [dict(t.values) for t in found] == [
        {"a": a, "b": b} for a in (2, 3, 4) for b in (0.0, 0.25, 0.5, 0.75)
    ]


def test_nested_parameters_are_one_argument_that_a_recipe_takes() -> None:
    parameters = (
        Parameter("trainer/learning_rate", (1e-05,)),
        Parameter("objective/terms/streak", (0.5,)),
        Parameter("trainer/max_minutes", (None,)),
        Parameter("seed", (3,)),
    )
    (trial,) = trials(sweep(*parameters), None, 0)
    assert trial.words == [
        "trainer={'learning_rate': 1e-05, 'max_minutes': None}",
        "objective={'terms': {'streak': 0.5}}",
        "seed=3",
    ]
    recipe = load_recipe(["recipe=debug_block", *trial.words])
    assert (recipe.trainer.learning_rate, recipe.objective.terms) == (1e-05, {"streak": 0.5})
