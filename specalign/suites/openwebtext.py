"""OpenWebText (Gokaslan & Cohen, 2019): web pages, continued from their first 64 words as SpecDiff
measures (arXiv 2408.05636): 1,024 new tokens at temperature 1."""

from functools import partial

from specalign.suites.prompt import Place, Suite, read_prefix

PLACE = Place("Skylion007/openwebtext", split="train[:2000]", revision="refs/convert/parquet")
SUITE = Suite(
    "openwebtext",
    "OpenWebText",
    "continuation",
    partial(read_prefix, suite="openwebtext", words=64, category="web"),
    PLACE,
    temperature=1.0,
    excluded=False,
)
