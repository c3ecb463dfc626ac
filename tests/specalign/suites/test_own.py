"""Decontamination covers exactly what the suites measure with."""

from __future__ import annotations

from collections import Counter

from specalign.suites.own import BUILTIN, TASKS
from specalign.suites.places import PLACES, Place
from specalign.suites.registry import SUITES


def test_own_prompts_and_places_are_those_of_the_suites() -> None:
    rows = [
        row["prompt"] for suite in SUITES.values() if suite.place == Place() for row in suite.rows
    ]
    prompts = [text for kinds in (BUILTIN, TASKS) for texts in kinds.values() for text in texts]
    assert Counter(rows) == Counter(prompts) == Counter(set(prompts)) and len(prompts) == 60
    assert {s.name: s.place for s in SUITES.values() if not s.rows} == PLACES
