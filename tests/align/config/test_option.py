"""Every key knows its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from align.config.option import MOST, Group, option


@dataclass
class Some(Group):
    count: int = option(1, "a count", low=1, high=9)
    rate: float = option(0.5, "a rate", above=0)
    shares: dict[str, float] = option({"a": 0.5}, "shares", high=1)
    name: str = option("x", "a name")
    text: str = option("x", "a text", prose=True)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, None),
        ({"text": "two\nlines"}, None),
        ({"count": True}, None),
        ({"count": 0}, "some.count=0 must be at least 1"),
        ({"count": 10}, "some.count=10 must be at most 9"),
        ({"rate": 0.0}, "some.rate=0.0 must be greater than 0"),
        ({"rate": float("nan")}, "some.rate=nan must be a finite number"),
        ({"rate": 2.0 * MOST}, f"must be at most {MOST}"),
        ({"shares": {"a": 0.5, "b": 2.0}}, "must be at most 1"),
        ({"name": "two\nlines"}, "must not hold control characters"),
    ],
)
def test_the_first_impossible_value_is_named(values: dict[str, Any], says: str | None) -> None:
    found = Some(**values).problem("some.")
    assert found is None if says is None else found is not None and says in found


def test_a_default_is_nobody_elses() -> None:
    first, second = Some(), Some()
    first.shares["a"] = 0.1
    assert second.shares == {"a": 0.5}
