"""Benchmark prompts written for this project; they need no network and no licence."""

from __future__ import annotations

import json
from pathlib import Path


def _read_prompts(suite: str) -> dict[str, tuple[str, ...]]:
    """The prompts of a suite by category."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    found: dict[str, tuple[str, ...]] = {}
    for row in map(json.loads, lines):
        if row["suite"] == suite:
            found[row["category"]] = (*found.get(row["category"], ()), row["prompt"])
    return found


BUILTIN = _read_prompts("builtin")
"""Forty prompts, ten each of chat, reasoning, coding and maths."""
TASKS = _read_prompts("tasks")
"""Twenty prompts, five each of translation, summary, questions and retrieval."""
