"""Benchmark prompts written for this project; they need no network and no licence."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from specalign.suites.prompt import Prompt, Row, Suite, text


def _read(row: Row, number: int) -> Prompt:
    return Prompt(row["id"], text(row, "prompt"), row["category"])


def _own_suite(name: str, title: str) -> Suite:
    """A suite of prompts.jsonl."""
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    counts = Counter[str]()
    rows = []
    for row in map(json.loads, lines):
        if row["suite"] == name:
            counts[row["category"]] += 1
            rows.append({**row, "id": f"{name}-{row['category']}-{counts[row['category']]}"})
    return Suite(name, title, "mixed", _read, rows=rows)


BUILTIN = _own_suite("builtin", "built-in prompts")
"""Forty prompts, ten each of chat, reasoning, coding and maths."""
TASKS = _own_suite("tasks", "translation, summaries, questions")
"""Five each of other kinds in benchmarks of speculative decoding (Spec-Bench, arXiv 2401.07851)."""
