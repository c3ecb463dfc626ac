"""GPQA Diamond (arXiv 2311.12022): graduate-level multiple choice."""

from __future__ import annotations

import random

from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read(row: Row, number: int) -> Prompt | None:
    """The question and its lettered choices. The hub has the right answer in a column of its own:
    the choices are shuffled, with the question as the seed."""
    if row.get("source", "GPQA Diamond") != "GPQA Diamond":
        return None
    question = text(row, "Question", "question")
    choices = row.get("choices")
    if not choices:
        choices = [text(row, column) for column in ("Correct Answer", *_WRONG)]
        random.Random(question).shuffle(choices)
    lines = [
        f"({letter}) {str(choice).strip()}"
        for letter, choice in zip("ABCDEFGHIJ", choices, strict=False)
    ]
    key = row.get("Record ID", row.get("id", number))
    domain = row.get("High-level domain", row.get("domain", ""))
    ask = "Reason step by step, then give the letter of the right answer."
    return Prompt(f"gpqa-{key}", "\n".join([question, "", *lines, "", ask]), str(domain))


SUITE = Suite(
    "gpqa", "GPQA Diamond", "reasoning", read, PLACES["gpqa"], "25 of the 198 Diamond questions"
)
