"""Accepted drafts counted from outputs, and from counters that go on."""

from __future__ import annotations

from decode.exporting.counts import Counts


def test_counts_since() -> None:
    later = Counts(10, 40, 12, (8, 3, 1)).since(Counts(4, 16, 2, (2,)))
    assert later == Counts(6, 24, 10, (6, 3, 1)) and later.tau == 1 + 10 / 6 and Counts().tau == 1


def test_counts_of_outputs() -> None:
    found = Counts.of([[2, 0, 1], [], [4]], 4)
    assert found == Counts(4, 16, 7, (3, 2, 1, 1)) and found.tau == 1 + 7 / 4
    assert found.line == "4 calls, τ 2.750, accepted at each position 3 2 1 1"
