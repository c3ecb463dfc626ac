from __future__ import annotations

from align.benchmarks.places import BENCHMARKS
from decode.suites.registry import SUITES


def test_the_table_is_that_of_the_suites() -> None:
    others = [s for s in SUITES.values() if not s.rows]
    told = {s.name: (s.hub, s.config, s.split, s.package, s.version, s.member) for s in others}
    known = {b.name: (b.hub, b.config, b.split, b.package, b.version, b.member) for b in BENCHMARKS}
    assert known == told
