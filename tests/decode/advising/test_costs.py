"""Costs of calls: straight lines between what was measured, and caches that stay as they were."""

from __future__ import annotations

import pytest

from align.target.loading import load_target
from decode.advising.costs import SHORT, VerifyCosts, _call, _filled, verify_costs

COSTS = VerifyCosts({(1, 1): 1.0, (1, 5): 3.0, (4, 1): 4.0, (4, 5): 8.0}, {1: 0.001, 5: 0.003})


@pytest.mark.parametrize(
    ("batch", "rows", "context", "seconds"),
    [
        (1, 1, SHORT, 1.0),
        (1, 3, SHORT, 2.0),
        (2.5, 1, SHORT, 2.5),
        (2.5, 3, SHORT, 4.0),
        (9, 9, SHORT, 8.0),
        (4, 3, SHORT + 100, 6.0 + 4 * 0.002 * 100),
        (4, 3, 16, 6.0),
    ],
)
def test_between_points(batch: float, rows: float, context: float, seconds: float) -> None:
    assert COSTS.at(batch, rows, context) == pytest.approx(seconds)


def test_a_call_leaves_the_caches_as_they_were() -> None:
    target = load_target("debug")
    caches = [_filled(target, 20, 6) for _ in range(3)]
    for some in (caches[:1], caches):
        for rows in (1, 6):
            assert _call(target, some, rows) > 0
            assert [cache.length for cache in some] == [20] * len(some)


def test_every_shape_is_timed_within_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.advising.costs.REPEATS", 1)
    target = load_target("debug")
    found = verify_costs(target, [1, 2], [1, 4], 100_000)  # its context holds 512
    assert set(found.short) == {(1, 1), (1, 4), (2, 1), (2, 4)} and set(found.slope) == {1, 4}
    assert all(s > 0 for s in found.short.values()) and all(s >= 0 for s in found.slope.values())
    assert verify_costs(target, [1], [2], 10).slope == {}
