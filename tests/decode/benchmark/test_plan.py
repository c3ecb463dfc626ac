"""Which drafters a figure depends on."""

from __future__ import annotations

from decode.benchmark.plan import used_drafters
from decode.systems.parsing import read_method


def test_the_drafters_that_a_figure_depends_on() -> None:
    given = {"block": "a", "variable_prefix": "b", "diffusion": "c"}
    named = {"plain": read_method("plain"), "d2sd": read_method("d2sd"), "lookup": read_method("lookup")}
    assert used_drafters(named, given) == {"block": "a", "variable_prefix": "b"}
    assert used_drafters({"plain": read_method("plain"), "drafter": read_method("drafter")}, given) == {
        "block": "a"
    }
    assert used_drafters({"plain": read_method("plain"), "specdiff": read_method("specdiff")}, given) == {
        "diffusion": "c"
    }
