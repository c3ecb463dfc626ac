"""MT-Bench (arXiv 2306.05685): 80 open questions in eight categories; the first turn of each."""

from __future__ import annotations

from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite


def read(row: Row, number: int) -> Prompt:
    """`prompt` on the hub, `turns` in the original file: a list of turns."""
    turns = row.get("turns") or row.get("prompt")
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise KeyError("prompt")
    key = row.get("question_id", row.get("prompt_id", number))
    return Prompt(f"mtbench-{key}", turns[0], str(row.get("category", "")))


SUITE = Suite("mtbench", "MT-Bench", "chat", read, PLACES["mtbench"])
