from __future__ import annotations

from align.benchmarks.places import PLACES
from decode.suites.registry import SUITES


def test_the_table_is_that_of_the_suites() -> None:
    assert {s.name: s.place for s in SUITES.values() if not s.rows} == PLACES
