"""CHAMP (arXiv 2401.06961): 270 competition problems; from its package alone."""

from __future__ import annotations

from specalign.suites.gsm8k import ASK
from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text


def read(row: Row, number: int) -> Prompt:
    """The problem's plain text, with its field as the category."""
    return Prompt(
        text(row, "identifier"), text(row, "_text") + ASK, str(row.get("category", "math"))
    )


SUITE = Suite("champ", "CHAMP", "math", read, PLACES["champ"])
