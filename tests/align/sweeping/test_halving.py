"""Rungs, and who goes on."""

from __future__ import annotations

import math

import pytest

from align.sweeping.halving import best, rungs


@pytest.mark.parametrize(
    ("trials", "eta", "steps", "least", "found"),
    [
        (9, 3, 900, 1, [(9, 100), (3, 300), (1, 900)]),
        (9, 3, 900, 200, [(9, 300), (3, 900)]),
        (6, 2, 12, 3, [(6, 3), (3, 6), (1, 12)]),
        (2, 3, 900, 1, [(2, 900)]),
        (1, 2, 5, 1, [(1, 5)]),
    ],
)
def test_rungs(trials: int, eta: int, steps: int, least: int, found: list[tuple[int, int]]) -> None:
    assert rungs(trials, eta, steps, least) == found


def test_earlier_rungs_cost_a_share() -> None:
    for eta in (2, 3, 4):
        cost = [n * s for n, s in rungs(64, eta, 6400, 1)]
        assert sum(cost) < 64 * 6400 / 2 and rungs(64, eta, 6400, 1)[-1][1] == 6400


def test_the_best_go_on() -> None:
    scores = [(0, 1.0), (1, 3.0), (2, math.nan), (3, 2.0), (4, 3.0)]
    assert best(scores, 2, True) == [1, 4] and best(scores, 3, True) == [1, 3, 4]
    assert best(scores, 2, False) == [0, 3] and best(scores, 5, True) == [0, 1, 2, 3, 4]
