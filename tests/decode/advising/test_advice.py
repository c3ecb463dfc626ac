"""What advice follows from costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from decode.advising.advice import Advice, DecodingCosts, advise, list_contexts, summarize
from decode.advising.costs import SHORT, ForwardCosts
from decode.advising.observation import PLAIN, DraftSize, Observation
from decode.advising.render import render, to_dict

CHAINS = [DraftSize(n) for n in (1, 2, 4)]


def make_costs(
    row_cost: float, reach: tuple[float, ...] = (0.8, 0.5, 0.15, 0.05), drafting: float = 0.1
) -> DecodingCosts:
    """A forward pass takes 1 s for the weights and `row_cost` for each row; half as much is accepted at temperature 1."""
    short = {(b, n): 1.0 + row_cost * b * n for b in (1, 8, 32) for n in (1, 2, 3, 5)}
    costs = DecodingCosts(ForwardCosts(short))
    for temperature, share in ((0.0, 1.0), (1.0, 0.5)):
        costs.observed[PLAIN, temperature] = Observation((), 1.0, 0.0, 0.0, 0.0, 256)
        for size in CHAINS:
            accepted = tuple(share * r for r in reach[: size.tokens])
            found = Observation(accepted, 1 + sum(accepted), drafting, drafting, drafting / 2, 256)
            costs.observed[size, temperature] = found
    return costs


def advise_at(costs: DecodingCosts, temperature: float = 0.0, batch: int = 1) -> Advice:
    return advise(costs, [256], [temperature], batch)[0]


@pytest.mark.parametrize(
    ("batch", "rows", "context", "seconds"),
    [
        (1, 3, SHORT, 2.0),
        (2.5, 3, SHORT, 4.0),
        (9, 9, SHORT, 8.0),
        (4, 3, SHORT + 100, 6.8),
        (4, 3, 16, 6.0),
    ],
)
def test_forward_costs_are_linear_between_what_was_measured(
    batch: float, rows: float, context: float, seconds: float
) -> None:
    costs = ForwardCosts({(1, 1): 1.0, (1, 5): 3.0, (4, 1): 4.0, (4, 5): 8.0}, {1: 0.001, 5: 0.003})
    assert costs.at(batch, rows, context) == pytest.approx(seconds)


def test_a_round_is_the_sum_of_its_parts() -> None:
    costs = make_costs(0.01)
    chain = CHAINS[-1]
    assert costs.round_seconds(chain, 8, 256, 0.0) == pytest.approx(
        1.0 + 0.01 * 8 * 5 + 0.1 + 7 * 0.05
    )
    assert costs.speed(chain, 1, 256, 0.0) == pytest.approx(2.5 / 1.15)
    assert costs.interpolate(chain, 0.5, "tau") == pytest.approx((2.5 + 1.75) / 2)
    costs.forward.slope = dict.fromkeys((1, 2, 3, 5), 0.001)
    costs.draft_slope = 0.01
    assert costs.round_seconds(PLAIN, 2, SHORT + 100, 0.0) == pytest.approx(1.02 + 2 * 0.1)
    assert costs.round_seconds(chain, 1, 356, 0.0) == pytest.approx(
        1.05 + 0.1 + 292 * 0.001 + 100 * 0.01
    )


def test_times_of_greedy_rounds_do_not_count_for_sampling() -> None:
    costs = make_costs(0.01)
    costs.observed[CHAINS[0], 1.0] = replace(costs.observed[CHAINS[0], 1.0], overhead=0.5)
    assert [costs.interpolate(CHAINS[0], t, "overhead") for t in (0.0, 0.1, 1.0)] == [0.1, 0.5, 0.5]


def test_the_more_a_row_costs_the_less_is_drafted() -> None:
    assert advise_at(make_costs(0.2)).gains[1][0] == DraftSize(2)
    assert advise_at(make_costs(0.0001)).gains[1][0] == DraftSize(4)


def test_drafting_is_switched_off_where_it_stops_paying() -> None:
    costs = make_costs(0.05)
    cold, hot = advise(costs, [256], [0.0, 1.0], 32)
    assert 0 < hot.pays_up_to < cold.pays_up_to < 32
    for a in (cold, hot):
        assert a.gains[a.pays_up_to][1] > 1 >= a.gains[a.pays_up_to + 1][1]
    assert f"switch it off above batch {hot.pays_up_to} to {cold.pays_up_to}" in summarize(
        [cold, hot]
    )
    useless = advise_at(make_costs(0.01, (0.0,) * 4), batch=32)
    assert useless.pays_up_to == 0 and summarize([useless]).startswith("leave drafting off")
    free = advise_at(make_costs(0.0, drafting=0.0), batch=32)
    assert "pays up to batch 32 everywhere" in summarize([free])
    size = free.gains[1][0]
    assert summarize([free, useless, useless]).startswith(
        f"use {size.label} ({size.options}); switch it off"
    )


def test_a_size_counts_only_at_temperatures_where_it_was_tried() -> None:
    costs, tree = make_costs(0.001), DraftSize(4, 8)
    costs.observed[tree, 0.0] = Observation((0.9,) * 4, 4.6, 0.1, 0.1, 0.1, 256)
    assert advise_at(costs).gains[1][0] == tree and advise_at(costs, 1.0).gains[1][0] != tree


def test_tables_and_values() -> None:
    costs = make_costs(0.01)
    advice = advise(costs, list_contexts(512), [0.0], 8)
    page = render(costs, advice)
    for text in (
        "| 8 | 1080.0 |",
        "| γ = 2 | 0 | 2.30 | 0.80 0.50 | 100.0 | 100.0 | 50.0 |",
        "| 256 | 0 | γ = ",
        "**Use γ = ",
    ):
        assert text in page, page
    values = json.loads(json.dumps(to_dict(costs, advice)))
    assert (
        values["sentence"] in page.replace("**U", "**u") and values["advice"][0]["context"] == 256
    )
