"""Measuring a tiny target."""

from __future__ import annotations

import pytest

from decode.advising.costs import _fill_cache, _time_forward, measure_forward_costs
from decode.advising.observation import PLAIN, DraftSize, open_decoders
from decode.advising.run import MeasurementOptions, list_chains, measure_costs
from specalign.common.errors import UserError
from specalign.lm.loading import load_target


def test_a_timed_forward_pass_leaves_the_caches_as_they_were() -> None:
    target = load_target("debug")
    caches = [_fill_cache(target, 20, 6) for _ in range(3)]
    for some in (caches[:1], caches):
        assert _time_forward(target, some, 6) > 0
        assert [cache.length for cache in some] == [20] * len(some)


def test_shapes_are_timed_within_the_context() -> None:
    target = load_target("debug")  # its context holds 512 tokens
    costs = measure_forward_costs(target, [1, 2], [1, 4], 100_000)
    assert set(costs.short) == {(1, 1), (1, 4), (2, 1), (2, 4)} and set(costs.slope) == {1, 4}
    assert all(s > 0 for s in costs.short.values()) and all(s >= 0 for s in costs.slope.values())
    assert measure_forward_costs(target, [1], [2], 10).slope == {}


def test_every_size_is_measured_at_every_temperature() -> None:
    target = load_target("debug")
    make_decoder, longest, branches = open_decoders(target, "debug", "lookup", 3)
    assert (longest, branches, make_decoder(PLAIN).drafter) == (3, False, None)
    options = MeasurementOptions(["abcabcabc", "one two"], (0.0, 1.0), 12, longest, [], 300, 2)
    costs = measure_costs(target, make_decoder, options)
    sizes = [PLAIN, *map(DraftSize, list_chains(3))]
    assert set(costs.observed) == {(size, t) for size in sizes for t in (0.0, 1.0)}
    for (size, _), seen in costs.observed.items():
        assert len(seen.reach) == size.tokens and seen.overhead >= seen.draft >= 0
        assert seen.tau == 1 if size == PLAIN else seen.tau >= 1
    assert list_chains(7) == [1, 2, 4, 7]


def test_without_a_drafter_the_error_says_what_to_give() -> None:
    with pytest.raises(UserError, match="no drafter is shipped for debug: give --drafter"):
        open_decoders(load_target("debug"), "debug", None, None)
