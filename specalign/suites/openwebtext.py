"""OpenWebText (Gokaslan & Cohen, 2019): web pages to continue, as SpecDiff measures (arXiv 2408.05636):
1,024 new tokens at temperature 1."""

from __future__ import annotations

from specalign.suites.prompt import Place, Prompt, Row, Suite, find_text

PREFIX = 64
"""Words of a page that the target continues."""


def read_openwebtext(row: Row, number: int) -> Prompt | None:
    """The beginning of a page that has more."""
    words = find_text(row, "text").split()
    if len(words) <= PREFIX:
        return None
    return Prompt(f"openwebtext-{number}", " ".join(words[:PREFIX]), "web", raw=True)


SUITE = Suite(
    "openwebtext",
    "OpenWebText",
    "continuation",
    read_openwebtext,
    Place("Skylion007/openwebtext", split="train[:2000]"),
    temperature=1.0,
    excluded=False,
)
