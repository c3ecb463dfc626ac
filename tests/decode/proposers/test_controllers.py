"""Controllers: the length of the most tokens a second, and that a drafter under one keeps the target's law."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from decode.proposers.controllers import CostAware, Curve, Fastest, Line, TreeSize


def test_a_line_through_points() -> None:
    line = Line(0.9)
    assert line.at(3) == 0.0
    for x in (1, 2, 5):
        line.add(x, 2.0 + 0.5 * x)
    assert line.at(9) == pytest.approx(6.5) and line.at(0) == pytest.approx(2.0)
    flat = Line(0.9)
    flat.add(4, 3.0)
    flat.add(4, 5.0)
    assert flat.at(1) == flat.at(9) == pytest.approx((0.9 * 3 + 5) / 1.9)
    falling = Line(1.0)
    falling.add(1, 3.0)
    falling.add(2, 1.0)
    assert falling.at(10) == falling.at(1) == pytest.approx(2.0)  # noise: more work is never less


@pytest.mark.parametrize(
    ("alpha", "draft", "verify"),
    [(0.9, 0.0, 0.01), (0.9, 0.01, 0.2), (0.2, 0.2, 0.02), (0.8, 0.1, 0.1)],
)
def test_the_cost_aware_length_is_the_best_one(alpha: float, draft: float, verify: float) -> None:
    """A token accepted with α whatever its place; drafting takes 0.05 + n·draft, a call 1 + n·verify."""
    most, rng, controller = 12, random.Random(0), CostAware(keep=0.999)

    def rate(n: int) -> float:
        tau = sum(alpha**m for m in range(n + 1))
        return tau / (1.05 + n * (draft + verify))

    best = max(range(1, most + 1), key=rate)
    lengths = []
    for _ in range(400):
        n = controller.length(most)
        accepted = next((m for m in range(n) if rng.random() > alpha), n)
        controller.observe(n, accepted, 0.05 + n * draft, 1 + n * verify)
        lengths.append(n)
    assert lengths[:3] == [12, 6, 1] or lengths[:3] == [12, 7, 1]
    settled = lengths[-100:]
    assert all(rate(n) > 0.95 * rate(best) for n in settled), (best, Counter(settled))
    assert abs(max(set(settled), key=settled.count) - best) <= 2


@pytest.mark.parametrize("drift", [False, True])
def test_the_fastest_of_several_ways_is_found_again_when_it_changes(drift: bool) -> None:
    """Tokens a round and seconds with noise of their own; halfway the slowest way becomes the fastest."""
    rng, controller, rates = random.Random(3), Fastest(4), [1.0, 1.3, 0.8, 1.1]
    chosen = []
    for i in range(1200):
        if drift and i == 600:
            rates[2] = 2.0
        way = controller.choose()
        tokens = 1 + int(rng.random() < 0.5) + int(rng.random() < 0.25)
        controller.observe(way, tokens, 1.75 / rates[way] * (0.9 + 0.2 * rng.random()))
        chosen.append(way)
    assert sorted(chosen[:12]) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert chosen[300:600].count(1) > 150 and chosen[300:600].count(2) < 60
    if drift:
        assert chosen[-300:].count(2) > 200


def test_a_curve_never_falls() -> None:
    """Pool adjacent violators by hand: 3 and 1 at 4 and 8 become their weighted mean; straight lines between."""
    curve = Curve(1.0)
    for x, y in ((1, 1.0), (4, 3.0), (4, 3.0), (8, 1.5), (16, 5.0)):
        curve.add(x, y)
    assert curve.fit() == [(1, 1.0), (4, 2.5), (8, 2.5), (16, 5.0)]
    assert [curve.at(x) for x in (0, 1, 2, 6, 12, 99)] == [1.0, 1.0, 1.5, 2.5, 3.75, 5.0]
    recent = Curve(0.5)
    for y in (1.0, 1.0, 4.0):
        recent.add(2, y)
    assert recent.at(2) == pytest.approx(
        (0.25 * 1 + 0.5 * 1 + 4) / 1.75
    )  # what is long ago counts less


def costly(size: TreeSize, rows: float, nodes: int) -> None:
    """A finished round in which a call costs 1 second and `rows` more a node; q was right."""
    size.observe(nodes, 1.0, 1, 0.1, 1 + rows * nodes)


def test_a_tree_has_the_nodes_that_pay() -> None:
    """The first rounds learn the costs; then (1 + Σ p)/(cost of n) is largest, by brute force."""
    paths = [0.7, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.001]
    for rows in (0.0, 0.02, 0.1, 0.5, 2.0):
        size, tried = TreeSize(8, prior=1e9), []
        while size.untried:
            tried.append(size.choose(paths))
            costly(size, rows, tried[-1])
        assert tried == [8, 4, 2, 1]
        speed = [(1 + sum(paths[:n])) / (1.1 + rows * n) for n in range(1, 9)]
        assert size.choose(paths) == 1 + speed.index(max(speed))
    assert TreeSize(1).untried == [1] and TreeSize(8).choose(paths[:3]) == 3


def test_paths_are_corrected_by_what_was_accepted() -> None:
    """A q that is too sure of itself gets smaller trees."""
    sure, right = TreeSize(8), TreeSize(8)
    for nodes in (8, 4, 2, 1) * 10:
        right.observe(nodes, 1.0, 1, 0.1, 1 + 0.2 * nodes)
        sure.observe(nodes, 1.0, 0, 0.1, 1 + 0.2 * nodes)
    paths = [0.9, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert sure.choose(paths) == 1 < right.choose(paths)
