"""LM1B (arXiv 1312.3005): sentences of news to continue, as SpecDiff measures (arXiv 2408.05636): 100
new tokens at temperature 1."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, read_prefix

PREFIX = 8
"""Words of a sentence that the target continues."""


def read_lm1b(row: Row, number: int) -> Prompt | None:
    """The beginning of a sentence that has more."""
    return read_prefix("lm1b", row, number, PREFIX, "news")


SUITE = Suite(
    "lm1b",
    "LM1B",
    "continuation",
    read_lm1b,
    Place("dvruette/lm1b", split="test[:2000]"),
    max_new_tokens=100,
    temperature=1.0,
)
