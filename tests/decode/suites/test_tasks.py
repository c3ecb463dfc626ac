"""The prompts of other kinds than chat, code and maths."""

from __future__ import annotations

from collections import Counter

from align.benchmarks.own import TASKS
from decode.suites import tasks
from decode.suites.sources import load_suite


def test_tasks_has_twenty_distinct_prompts_of_four_kinds() -> None:
    loaded = load_suite(tasks.SUITE)
    assert len({p.content for p in loaded.prompts}) == len({p.id for p in loaded.prompts}) == 20
    assert Counter(p.category for p in loaded.prompts) == dict.fromkeys(TASKS, 5)
