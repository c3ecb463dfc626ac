"""The trials of a sweep: all combinations, or draws that a seed repeats."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from align.common.errors import UserError
from align.sweeping.config import Parameter, Sweep

MOST = 10_000
"""Trials; more are a mistake."""


@dataclass(frozen=True)
class Trial:
    """One combination, in the order of the file."""

    number: int
    values: tuple[tuple[str, Any], ...]

    @property
    def words(self) -> list[str]:
        """As an agent passes them: `${args_no_hyphens}`."""
        return [f"{key}={value}" for key, value in self.values]

    @property
    def name(self) -> str:
        return f"{self.number:04d}"


def trials(sweep: Sweep, count: int | None, seed: int, method: str | None = None) -> list[Trial]:
    """Those of a grid, or `count` drawn ones (default 10, or the file's run_cap).

    Raises:
        UserError: a grid over a range, or one of too many trials.
    """
    count = count or sweep.cap
    if count is not None and count > MOST:
        raise UserError(f"{sweep.name}: {count} trials; at most {MOST} (--count, run_cap)")
    if (method or sweep.method) == "grid":
        ranges = [p.name for p in sweep.parameters if not p.values]
        if ranges:
            raise UserError(
                f"{sweep.name}: a grid needs values for {ranges[0]}; --method random draws from a range"
            )
        size = math.prod(len(p.values) for p in sweep.parameters)
        if size > MOST and count is None:
            raise UserError(
                f"{sweep.name}: a grid of {size} trials; --count limits them, --method random --count N draws some"
            )
        found = []
        for number, values in enumerate(product(*(p.values for p in sweep.parameters))):
            if number == count:
                break
            found.append(Trial(number, tuple(zip((p.name for p in sweep.parameters), values, strict=True))))
        return found
    return [_drawn(sweep, number, seed) for number in range(count or 10)]


def _drawn(sweep: Sweep, number: int, seed: int) -> Trial:
    """A trial that depends on seed and number alone, whatever is drawn for others."""
    return Trial(
        number,
        tuple((p.name, draw(p, random.Random(f"{seed} {number} {p.name}"))) for p in sweep.parameters),
    )


def draw(parameter: Parameter, generator: random.Random) -> Any:
    """A value of a parameter, after W&B's definitions."""
    p, kind = parameter, parameter.distribution
    if p.values:
        return generator.choices(p.values, weights=p.weights or None)[0]
    if kind == "int_uniform":
        return generator.randint(int(p.low), int(p.high))
    if kind.endswith("normal"):
        value = generator.gauss(p.low, p.high)
    elif kind.endswith("log_uniform_values"):
        value = math.exp(generator.uniform(math.log(p.low), math.log(p.high)))
    else:
        value = generator.uniform(p.low, p.high)
    return round(value / p.step) * p.step if kind.startswith("q_") else value


def key(trial: Trial) -> str:
    """What a trial is recognised by when a sweep goes on."""
    return json.dumps([list(pair) for pair in trial.values])
