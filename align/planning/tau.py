"""What τ to expect after so many tokens: a fit over runs that were measured (runs.json holds them with their sources).

log(τ − 1) = a_kind + b·log(tokens), least squares, one exponent for all kinds of drafters and a level for each; the band is the 95% prediction
interval of one more run. It rests on one small target, and says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from math import exp, gamma, log, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np

RUNS = Path(__file__).with_name("runs.json")
LEVEL = 0.95
FAR = 3.0
"""Times the most tokens of a run: there the fit ends. Of more tokens nothing is said but that."""


@dataclass(frozen=True)
class ExpectedTau:
    """τ with its band; `runs`: how many of this kind it rests on, out of `of`. guess: why not to rely on it; empty where one may."""

    value: float
    low: float
    high: float
    runs: int
    of: int
    guess: str = ""


@cache
def measured() -> dict[str, Any]:
    """runs.json."""
    found: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8"))
    return found


def expected_tau(
    kind: str, tokens: float, drafted: int, how: str = "sampling", target: str = ""
) -> ExpectedTau | None:
    """Of a drafter of a kind that has seen so many text tokens; None where no run of that kind was measured.

    Args:
        drafted: K; τ is at most K + 1. how: `greedy` or `sampling`. target: its name, to say where the runs had another.
    """
    record = measured()
    runs = [run for run in record["runs"] if how in run]
    kinds = sorted({run["kind"] for run in runs})
    own = [run for run in runs if run["kind"] == kind]
    if not own or tokens <= 0:
        return None
    most = max(run["rows"] for run in own) * record["tokens_per_row"]
    seen = [log(run["rows"] * record["tokens_per_row"]) for run in runs]
    x = np.array([[*(float(run["kind"] == k) for k in kinds), n] for run, n in zip(runs, seen, strict=True)])
    y = np.array([log(run[how] - 1) for run in runs])
    new = np.array([*(float(kind == k) for k in kinds), log(min(tokens, FAR * most))])
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    spare = len(runs) - x.shape[1]
    variance = float(((y - x @ solution) ** 2).sum()) / spare
    spread = sqrt(variance * (1 + float(new @ np.linalg.pinv(x.T @ x) @ new)))
    middle, wide = float(new @ solution), t_quantile((1 + LEVEL) / 2, spare) * spread
    why = []
    if target and target != record["target"]:
        why.append(f"every run had {record['target']} as its target")
    if tokens > FAR * most:
        why.append(
            f"the longest saw {most / 1e6:.2g}M tokens, so this is said of {FAR * most / 1e6:.2g}M and not of all"
        )
    value, low, high = (1 + min(float(drafted), exp(v)) for v in (middle, middle - wide, middle + wide))
    return ExpectedTau(value, low, high, len(own), len(runs), "; ".join(why))


def t_quantile(share: float, freedom: int) -> float:
    """Student's t: the value below which `share` ≥ 1/2 of the distribution with so many degrees of freedom lies."""
    scale = gamma((freedom + 1) / 2) / (sqrt(freedom * pi) * gamma(freedom / 2))
    places = np.linspace(0.0, 400.0, 800_001)
    density = scale * (1 + places**2 / freedom) ** (-(freedom + 1) / 2)
    upto = 0.5 + np.cumsum((density[1:] + density[:-1]) / 2) * (places[1] - places[0])
    return float(np.interp(share, upto, places[1:]))
