"""A verdict is that of all its comparisons."""

from __future__ import annotations

from pathlib import Path

from decode.exporting.verdict import Counts, Decoded, Verdict


def test_one_difference_decides() -> None:
    verdict = Verdict("dflash", Path("out"))
    for same in (True, False, True):
        verdict.add("a reader", same, "a rung")
    assert not verdict.same and verdict.lines == ["a reader: a rung"] * 3


def test_counts_since() -> None:
    later = Counts(10, 40, 12, (8, 3, 1)).since(Counts(4, 16, 2, (2,)))
    assert later == Counts(6, 24, 10, (6, 3, 1)) and later.tau == 1 + 10 / 6 and Counts().tau == 1


def test_counts_of_outputs() -> None:
    found = Counts.of([[2, 0, 1], [], [4]], 4)
    assert found == Counts(4, 16, 7, (3, 2, 1, 1)) and found.tau == 1 + 7 / 4
    assert found.line == "4 calls, τ 2.750, accepted at each position 3 2 1 1"


def test_whole_outputs_are_alike_up_to_near_ties() -> None:
    texts = Decoded([[1], [2]], [[3, 4], [5, 6]], [[1] * 60, [0] * 60])
    assert texts.as_plain([[3, 4], [5, 7]]) == 1
    same, line = texts.alike([[1] * 60, [0] * 59 + [1]], 4)
    assert same and line.startswith("1 of 2 prompts accepted call for call alike; ours: 120 calls, τ 1.500")
    assert not texts.alike([[1] * 60, [0] * 55 + [1] * 5], 4)[0]
