"""Successive halving (arXiv 1502.07943): all trials get few steps, the best of them more, until the last ones are trained in full.

Every rung trains anew, so that what the last rung says is what an undisturbed run says: a rung's steps are a share of the full ones, and its
learning rate comes down by its own end. All earlier rungs together cost a trial that reaches the end 1/(η−1) of its full training at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def rungs(trials: int, eta: int, steps: int, least: int) -> list[tuple[int, int]]:
    """(trials, steps) of every rung, the last one with all steps; a rung has at least `least` steps, and one trial.

    Example: 9 trials, η 3, 900 steps → (9, 100), (3, 300), (1, 900).
    """
    depth = 0
    while trials // eta ** (depth + 1) >= 1 and steps // eta ** (depth + 1) >= least:
        depth += 1
    return [
        (max(1, trials // eta**k), max(least, steps // eta ** (depth - k)) if k < depth else steps)
        for k in range(depth + 1)
    ]


def best(scores: Sequence[tuple[int, float]], count: int, maximise: bool) -> list[int]:
    """The trials with the `count` best scores, the first one of equals; those without a finite score come last."""
    sign = -1.0 if maximise else 1.0

    def place(pair: tuple[int, float]) -> tuple[bool, float, int]:
        number, score = pair
        finite = math.isfinite(score)
        return (not finite, sign * score if finite else 0.0, number)

    return sorted(number for number, _ in sorted(scores, key=place)[:count])
