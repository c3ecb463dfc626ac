"""A verdict is that of all its comparisons."""

from __future__ import annotations

from pathlib import Path

from decode.exporting.verdict import Verdict


def test_one_difference_decides() -> None:
    verdict = Verdict("dflash", Path("out"))
    for same in (True, False, True):
        verdict.add("a reader", same, "a rung")
    assert not verdict.same and verdict.lines == ["a reader: a rung"] * 3
