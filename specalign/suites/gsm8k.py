"""GSM8K (arXiv 2110.14168): grade-school word problems."""

from __future__ import annotations

from specalign.suites.places import PLACES
from specalign.suites.prompt import Prompt, Row, Suite, text

ASK = "\n\nReason step by step and put the final answer in \\boxed{}."


def read(row: Row, number: int) -> Prompt:
    """`question` on the hub, `prompt` in the package."""
    return Prompt(
        str(row.get("id", f"gsm8k-{number}")), text(row, "question", "prompt") + ASK, "math"
    )


SUITE = Suite("gsm8k", "GSM8K", "math", read, PLACES["gsm8k"], "100 of the 1319 test problems")
