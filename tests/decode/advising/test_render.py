"""The page."""

from __future__ import annotations

import json

from decode.advising.advice import Costs, advise, with_shorter_chains
from decode.advising.costs import VerifyCosts
from decode.advising.observed import PLAIN, Observed, Setting
from decode.advising.render import as_dict, render
from decode.advising.run import Point


def test_tables_sentence_and_check() -> None:
    chain = Setting(2)
    costs = Costs(VerifyCosts({(1, 1): 0.01, (1, 3): 0.012, (4, 1): 0.02, (4, 3): 0.05}, {1: 1e-6, 3: 2e-6}))
    costs.observed[PLAIN, 0.0] = Observed(PLAIN, 0.0, (), 0.0, 0.0, 0.0, 256, 100, 100)
    costs.observed[chain, 0.0] = Observed(chain, 0.0, (0.6, 0.3), 0.001, 0.0, 0.0005, 256, 190, 100)
    with_shorter_chains(costs, chain)
    found = advise(costs, [256], [0.0], [1, 4])
    points = [Point(chain, 3, 0.0, 110.0, 100.0)]
    page = render(costs, found, points)
    for words in (
        "| 1 | 10.0 | 12.0 |",
        "| γ = 2 | 0 | 1.90 | 0.60 0.30 | 1.0 | 0.0 | 0.5 |",
        "1.00 µs (1 rows)",
        "**Use γ = ",
        "+10% |",
    ):
        assert words in page, page
    assert "γ = 1 | 0 |" not in page  # made of the longer chain, not measured
    values = json.loads(json.dumps(as_dict(costs, found, points)))
    assert values["points"][0]["off"] == points[0].off and values["sentence"] in page.replace("**U", "**u")
