"""Values and times as text."""

from __future__ import annotations

from align.common.text import clock, cut, short


def test_long_values_are_cut() -> None:
    assert cut("abcd", 4) == "abcd" and cut("abcdef", 5) == "ab…" and short("abc") == "'abc'"
    assert len(short("a" * 200)) <= 80


def test_times() -> None:
    assert [clock(s) for s in (0, 59.6, 61, 3600, 7325)] == ["0:00", "1:00", "1:01", "1:00:00", "2:02:05"]
