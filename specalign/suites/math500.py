"""MATH-500 (arXiv 2305.20050), from MATH (arXiv 2103.03874): competition problems."""

from specalign.suites.prompt import REASON, Place, Prompt, Row, Suite, find_text


def read_math500(row: Row, number: int) -> Prompt:
    key = str(row.get("unique_id", f"math500-{number}"))
    subject = str(row.get("subject", "math"))
    return Prompt(key, find_text(row, "problem") + REASON, subject, row.get("answer"))


PLACE = Place("HuggingFaceH4/MATH-500", revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be")
SUITE = Suite(
    "math500", "MATH-500", "math", read_math500, PLACE, metric="exact match", max_new_tokens=2048
)
