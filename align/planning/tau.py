"""Which τ to expect after a number of text tokens: a fit through measured runs (runs.json).

log(τ − 1) = a_kind + b·log(tokens) by least squares, one exponent for all kinds of drafters and a
level for each. The band is the 95% prediction interval of one more run.
"""

import json
from dataclasses import dataclass
from functools import cache
from math import exp, log, sqrt
from pathlib import Path

import numpy as np

from specalign.common.schema import JsonObject

RUNS = Path(__file__).with_name("runs.json")
FAR = 3.0  # the fit ends at this multiple of the tokens of the longest run


@dataclass(frozen=True)
class ExpectedTau:
    """τ with its band, from `runs` runs of this kind among `of`. guess: why not to rely on it."""

    value: float
    low: float
    high: float
    runs: int
    of: int
    guess: str


@cache
def read_runs() -> JsonObject:
    found: JsonObject = json.loads(RUNS.read_text(encoding="utf-8"))
    return found


def predict_tau(
    kind: str, tokens: float, drafted: int, how: str, target: str
) -> ExpectedTau | None:
    """τ of a drafter of this kind that has seen this many text tokens; None if no run of its kind
    was measured. drafted: K; τ is at most K + 1. how: `greedy` or `sampling`."""
    record = read_runs()
    runs = [run for run in record["runs"] if how in run]
    seen = [run["rows"] * record["tokens_per_row"] for run in runs]
    own = [n for run, n in zip(runs, seen, strict=True) if run["kind"] == kind]
    if not own or tokens <= 0:
        return None
    kinds = sorted({run["kind"] for run in runs})

    def make_row(kind: str, tokens: float) -> list[float]:
        return [*(float(kind == k) for k in kinds), log(tokens)]

    x = np.array([make_row(run["kind"], n) for run, n in zip(runs, seen, strict=True)])
    y = np.array([log(run[how] - 1) for run in runs])
    new = np.array(make_row(kind, min(tokens, FAR * max(own))))
    solution, *_ = np.linalg.lstsq(x, y, rcond=None)
    freedom = len(runs) - x.shape[1]
    variance = float(((y - x @ solution) ** 2).sum()) / freedom
    spread = sqrt(variance * (1 + float(new @ np.linalg.pinv(x.T @ x) @ new)))
    # Student's 97.5% point, expanded in 1 / freedom
    width = spread * (1.95996 + 2.37227 / freedom + 2.82250 / freedom**2 + 2.55585 / freedom**3)
    middle = float(new @ solution)
    value, low, high = (
        1 + min(float(drafted), exp(logarithm))
        for logarithm in (middle, middle - width, middle + width)
    )
    guess = f"no run had more than {max(own):.2g} tokens" if tokens > FAR * max(own) else ""
    if target != record["target"]:
        guess = f"every run had {record['target']} as its target"
    return ExpectedTau(value, low, high, len(own), len(runs), guess)
