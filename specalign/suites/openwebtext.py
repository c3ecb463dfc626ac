"""OpenWebText (Gokaslan & Cohen, 2019): web pages to continue, as SpecDiff measures (arXiv 2408.05636):
1,024 new tokens at temperature 1."""

from specalign.suites.prompt import Place, Prompt, Row, Suite, read_prefix

PREFIX = 64
"""Words of a page that the target continues."""


def read_openwebtext(row: Row, number: int) -> Prompt | None:
    """The beginning of a page that has more."""
    return read_prefix("openwebtext", row, number, PREFIX, "web")


SUITE = Suite(
    "openwebtext",
    "OpenWebText",
    "continuation",
    read_openwebtext,
    Place("Skylion007/openwebtext", split="train[:2000]", revision="refs/convert/parquet"),
    temperature=1.0,
    excluded=False,
)
