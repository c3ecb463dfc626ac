"""LM1B (arXiv 1312.3005): sentences of news, continued from their first 8 words as SpecDiff measures
(arXiv 2408.05636): 100 new tokens at temperature 1."""

from functools import partial

from specalign.suites.prompt import Place, Suite, read_prefix

PLACE = Place("dvruette/lm1b", split="test[:2000]")
SUITE = Suite(
    "lm1b",
    "LM1B",
    "continuation",
    partial(read_prefix, suite="lm1b", words=8, category="news"),
    PLACE,
    max_new_tokens=100,
    temperature=1.0,
)
