"""The suites of prompts.jsonl, written for this project; they need no network and no licence."""

import json
from pathlib import Path

from specalign.suites.prompt import Prompt, Row, Suite, find_text


def _read_own(row: Row, number: int) -> Prompt:
    return Prompt(row["id"], find_text(row, "prompt"), row["category"])


def _own_suite(name: str, title: str) -> Suite:
    lines = Path(__file__).with_name("prompts.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["suite"] == name]
    return Suite(name, title, "mixed", _read_own, max_new_tokens=128, rows=rows)


BUILTIN = _own_suite("builtin", "built-in prompts")
"""Ten each of chat, reasoning, coding and maths."""
TASKS = _own_suite("tasks", "translation, summaries, questions")
"""Five each of other kinds in benchmarks of speculative decoding (Spec-Bench, arXiv 2401.07851)."""
