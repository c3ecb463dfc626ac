"""Controllers: the length of the most tokens a second."""

import random
from collections import Counter

import pytest

from decode.proposers.adaptive import CostAware


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
        controller.observe(n, accepted, 1.05 + n * (draft + verify))
        lengths.append(n)
    assert lengths[:3] == [12, 6, 1] or lengths[:3] == [12, 7, 1]
    settled = lengths[-100:]
    assert all(rate(n) > 0.95 * rate(best) for n in settled), (best, Counter(settled))
    assert abs(max(set(settled), key=settled.count) - best) <= 2
