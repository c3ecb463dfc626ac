from __future__ import annotations

from collections import Counter

from align.benchmarks.own import BUILTIN, TASKS
from align.benchmarks.places import Place
from decode.suites.registry import SUITES


def test_they_are_the_suites_without_a_hub_id() -> None:
    """Every one once."""
    rows = [row["prompt"] for suite in SUITES.values() if suite.place == Place() for row in suite.rows]
    ours = [text for kinds in (BUILTIN, TASKS) for texts in kinds.values() for text in texts]
    assert Counter(rows) == Counter(ours) == Counter(set(ours)) and len(ours) == 60
