"""The trials of a sweep: all combinations, or draws that a seed repeats."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from decimal import Decimal
from itertools import product
from typing import Any

from align.common.errors import UserError
from align.sweeping.config import NESTED, Parameter, Sweep

MAX_TRIALS = 10_000
"""More are a mistake."""


@dataclass(frozen=True)
class Trial:
    """One combination, in the order of the file."""

    number: int
    values: tuple[tuple[str, Any], ...]

    @property
    def words(self) -> list[str]:
        """Its arguments as an agent passes them (`${args_no_hyphens}`); nested parameters as one mapping."""
        found: dict[str, Any] = {}
        for name, value in self.values:
            *groups, last = name.split(NESTED)
            inner = found
            for group in groups:
                inner = inner.setdefault(group, {})
            inner[last] = value
        return [f"{key}={value}" for key, value in found.items()]

    @property
    def name(self) -> str:
        return f"{self.number:04d}"


def trials(sweep: Sweep, count: int | None, seed: int) -> list[Trial]:
    """List the trials of a grid, or draw `count` of them (default 10, or the file's run_cap).

    Raises:
        UserError: a grid over a distribution, or one of too many trials.
    """
    count = count or sweep.cap
    if count is not None and count > MAX_TRIALS:
        raise UserError(f"{sweep.name}: {count} trials; at most {MAX_TRIALS} (--count, run_cap)")
    if sweep.method == "random":
        return [_draw_trial(sweep, number, seed) for number in range(count or 10)]
    columns = [_grid_values(parameter, sweep.name) for parameter in sweep.parameters]
    size = math.prod(len(values) for values in columns)
    if size > MAX_TRIALS and count is None:
        raise UserError(
            f"{sweep.name}: a grid of {size} trials; --count limits them, --method random --count N draws some"
        )
    names = [parameter.name for parameter in sweep.parameters]
    combinations = zip(range(count or size), product(*columns), strict=False)
    return [Trial(number, tuple(zip(names, values, strict=True))) for number, values in combinations]


def _grid_values(parameter: Parameter, sweep: str) -> tuple[Any, ...]:
    """The values that W&B's grid goes through: those of a list, of int_uniform, and of q_uniform without its max."""
    p = parameter
    if p.values and not p.weights:
        return p.values
    if p.distribution not in ("int_uniform", "q_uniform"):
        raise UserError(
            f"{sweep}: a grid needs values for {p.name.replace(NESTED, '.')} (without probabilities); "
            "--method random draws from a distribution"
        )
    whole = p.distribution == "int_uniform"
    step = 1 if whole else p.step
    size = int(p.high - p.low) + 1 if whole else math.ceil((p.high - p.low) / p.step)
    if size > MAX_TRIALS:
        raise UserError(
            f"{sweep}: a grid of {size} values for {p.name.replace(NESTED, '.')}; at most {MAX_TRIALS}"
        )
    return tuple(_multiple(i, step, int(p.low) if whole else p.low) for i in range(size))


def _draw_trial(sweep: Sweep, number: int, seed: int) -> Trial:
    """Draw a trial that depends on seed and number alone, whatever is drawn for others."""
    return Trial(
        number,
        tuple((p.name, draw(p, random.Random(f"{seed} {number} {p.name}"))) for p in sweep.parameters),
    )


def draw(parameter: Parameter, generator: random.Random) -> Any:
    """Draw a value of a parameter, after the definitions of W&B's `sweeps` package."""
    p = parameter
    if p.values:
        return generator.choices(p.values, weights=p.weights or None)[0]
    kind = p.distribution.removeprefix("q_")
    if kind == "int_uniform":
        return generator.randint(int(p.low), int(p.high))
    if kind == "uniform":
        value = generator.uniform(p.low, p.high)
    elif kind in ("log_uniform_values", "inv_log_uniform_values"):  # the same: 1/x is log-uniform where x is
        value = math.exp(generator.uniform(math.log(p.low), math.log(p.high)))
    elif kind == "beta":
        value = generator.betavariate(p.low, p.high)
    else:
        value = generator.gauss(p.low, p.high)
        value = math.exp(min(value, 700.0)) if kind == "log_normal" else value
    return value if kind == p.distribution else _multiple(round(value / p.step), p.step)


def _multiple(count: int, step: float, start: float = 0) -> float:
    """`start + count · step` in decimals: 0.0003, not 0.00030000000000000003. An integer where both are."""
    if isinstance(step, int) and isinstance(start, int):
        return start + count * step
    return float(Decimal(repr(start)) + count * Decimal(repr(step)))


def key(trial: Trial) -> str:
    """What a trial is recognised by when a sweep is resumed."""
    return json.dumps([list(pair) for pair in trial.values])
