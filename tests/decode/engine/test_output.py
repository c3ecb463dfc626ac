"""Figures of one generation by their definitions."""

from __future__ import annotations

from decode.engine.output import Generation, Tree


def test_figures_of_a_generation() -> None:
    trees = [None, Tree((-1, -1, 0), [0, 2])]
    out = Generation([1, 2, 3, 4, 5, 6], "", 3, "length", 2, [2, 2], trees, [1, 2], seconds=2.5)
    assert out.nodes == [2, 3] and out.tau == 2.5 and out.tokens_per_second == 2.0
