"""MATH-500 (arXiv 2305.20050, from MATH, arXiv 2103.03874): 500 competition problems. No registry
package holds them."""

from __future__ import annotations

from specalign.suites.gsm8k import ASK
from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text


def read(row: Row, number: int) -> Prompt:
    """`problem`, with its subject as the category."""
    return Prompt(
        str(row.get("unique_id", f"math500-{number}")),
        text(row, "problem") + ASK,
        str(row.get("subject", "math")),
    )


SUITE = Suite("math500", "MATH-500", "math", read, PLACES["math500"])
