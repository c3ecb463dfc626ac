"""Advice from measured costs, and measuring a tiny target."""

from __future__ import annotations

import pytest

from decode.evaluation.advice import Advice, advise, render, summarize
from decode.evaluation.decoding_costs import (
    PLAIN,
    SHORT,
    DecodingCosts,
    DraftSize,
    MeasuredRounds,
    MeasurementOptions,
    measure_costs,
    measure_forward_costs,
    open_decoders,
)
from specalign.common.errors import UserError
from specalign.lm.loading import load_target


def make_costs(row_cost: float, accepted: float = 1.0, drafting: float = 0.1) -> DecodingCosts:
    """A forward pass takes 1 s for the weights and `row_cost` for each row; half as much is
    accepted at temperature 1."""
    costs = DecodingCosts(
        {(b, n): 1.0 + row_cost * b * n for b in (1, 8, 32) for n in (1, 2, 3, 5)}
    )
    for temperature, share in ((0.0, accepted), (1.0, accepted / 2)):
        costs.rounds[PLAIN, temperature] = MeasuredRounds(1.0, 0.0, 0.0, 0.0)
        for tokens, reach in ((1, 0.8), (2, 1.3), (4, 1.5)):
            costs.rounds[DraftSize(tokens), temperature] = MeasuredRounds(
                1 + share * reach, drafting, drafting, drafting / 2
            )
    return costs


def advise_at(costs: DecodingCosts, batch: int = 1) -> Advice:
    return advise(costs, [256], batch)[0]


@pytest.mark.parametrize(
    ("batch", "rows", "context", "seconds"),
    [(1, 3, SHORT, 2.0), (2.5, 3, SHORT, 4.0), (4, 3, SHORT + 100, 6.8), (4, 3, 16, 6.0)],
)
def test_forward_costs_are_linear_between_what_was_measured(
    batch: float, rows: float, context: float, seconds: float
) -> None:
    costs = DecodingCosts(
        {(1, 1): 1.0, (1, 5): 3.0, (4, 1): 4.0, (4, 5): 8.0}, {1: 0.001, 5: 0.003}
    )
    assert costs.forward(batch, rows, context) == pytest.approx(seconds)


def test_the_more_a_row_costs_the_less_is_drafted() -> None:
    assert advise_at(make_costs(0.2)).gains[1][0] == DraftSize(2)
    assert advise_at(make_costs(0.0001)).gains[1][0] == DraftSize(4)
    speed = make_costs(0.01).speed(DraftSize(4), 8, 256, 0.0)
    assert speed == pytest.approx(8 * 2.5 / (1.0 + 0.01 * 8 * 5 + 0.1 + 7 * 0.05))


def test_drafting_is_switched_off_where_it_stops_paying() -> None:
    greedy, sampled = advise(make_costs(0.05), [256], 32)
    assert 0 < sampled.pays_up_to < greedy.pays_up_to < 32
    for a in (greedy, sampled):
        assert a.gains[a.pays_up_to][1] > 1 >= a.gains[a.pays_up_to + 1][1]
    limits = f"above batch {sampled.pays_up_to} to {greedy.pays_up_to}"
    assert limits in summarize([greedy, sampled])
    useless = advise_at(make_costs(0.01, accepted=0.0), batch=32)
    assert useless.pays_up_to == 0 and summarize([useless]).startswith("Do not use drafting")
    free = advise_at(make_costs(0.0, drafting=0.0), batch=32)
    assert "pays off up to batch 32 in every measured case" in summarize([free])


def test_every_size_is_measured_at_every_temperature() -> None:
    target = load_target("debug")
    make_decoder, longest, branches = open_decoders(target, "debug", "lookup", 3)
    assert (longest, branches, make_decoder(PLAIN).drafter) == (3, False, None)
    options = MeasurementOptions(["abcabcabc", "one two"], (0.0, 1.0), 12, longest, [], 300, 2)
    costs = measure_costs(target, make_decoder, options)
    assert {(size.tokens, t) for size, t in costs.rounds} == {
        (tokens, t) for tokens in (0, 1, 2, 3) for t in (0.0, 1.0)
    }
    assert all(found.overhead >= found.draft >= 0 for found in costs.rounds.values())
    assert all(costs.rounds[PLAIN, t].tau == 1 for t in (0.0, 1.0))
    advice = advise(costs, [256], 2)
    assert f"**{summarize(advice)}.**" in render(costs, advice)
    short = measure_forward_costs(target, [1], [2], 10)  # no longer context to take a slope from
    assert short.slope == {}


def test_without_a_drafter_the_error_says_what_to_give() -> None:
    with pytest.raises(UserError, match="no drafter is shipped for debug: give --drafter"):
        open_decoders(load_target("debug"), "debug", None, None)
