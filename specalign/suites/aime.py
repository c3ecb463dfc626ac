"""AIME 2025: invitational problems with whole-number answers."""

from __future__ import annotations

from specalign.suites.gsm8k import ASK
from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text


def read(row: Row, number: int) -> Prompt | None:
    """`problem` on the hub; the package's file holds other benchmarks too, distinguished by
    `source`."""
    if row.get("source", "AIME2025") != "AIME2025":
        return None
    return Prompt(f"aime-{row.get('id', number)}", text(row, "problem", "question") + ASK, "math")


SUITE = Suite("aime", "AIME 2025", "math", read, PLACES["aime"], "25 of the 30 problems")
