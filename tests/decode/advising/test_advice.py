"""From costs to advice, on costs whose best setting is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode.advising.advice import Costs, advise, contexts_up_to, sentence, with_shorter_chains
from decode.advising.costs import SHORT, VerifyCosts
from decode.advising.observed import PLAIN, Observed, Setting

CHAIN = Setting(4)


def costs(row_cost: float, reach: tuple[float, ...] = (0.8, 0.6, 0.1, 0.0), draft: float = 0.1) -> Costs:
    """A call takes 1 s for the weights and `row_cost` for each row of each request."""
    short = {(b, n): 1.0 + row_cost * b * n for b in (1, 8, 32) for n in (1, 3, 5)}
    found = Costs(VerifyCosts(short, {1: 0.0, 5: 0.0}))
    for heat, share in ((0.0, 1.0), (1.0, 0.5)):
        found.observed[PLAIN, heat] = Observed(PLAIN, heat, (), 0.0, 0.0, 0.0, 256, 100, 100)
        own = tuple(share * r for r in reach)
        tau = 1 + sum(own)
        found.observed[CHAIN, heat] = Observed(
            CHAIN, heat, own, draft, 0.0, draft / 2, 256, round(1000 * tau), 1000
        )
    with_shorter_chains(found, CHAIN)
    return found


def test_a_round_is_what_it_is_made_of() -> None:
    found = costs(0.01)
    assert found.round_seconds(CHAIN, 8, 256, 0.0) == pytest.approx(1.0 + 0.01 * 8 * 5 + 0.1 + 7 * 0.05)
    assert found.speed_up(CHAIN, 1, 256, 0.0) == pytest.approx(2.5 / 1.15 * 1.01)
    assert found.value(CHAIN, 0.5, "tau") == pytest.approx((2.5 + 1.75) / 2)


def test_drawing_costs_as_much_at_any_temperature() -> None:
    found = costs(0.01)
    found.observed[CHAIN, 1.0] = replace(found.observed[CHAIN, 1.0], host=0.5)
    assert [found.value(CHAIN, t, "host") for t in (0.0, 0.1, 0.5, 1.0)] == [0.0, 0.5, 0.5, 0.5]


def test_the_fastest_stops_where_drafts_are_no_longer_accepted() -> None:
    """The third draft is accepted once in ten calls: where rows are dear, two are best."""
    assert advise(costs(0.1), [256], [0.0], [1])[0].best == Setting(2)
    assert advise(costs(0.0001), [256], [0.0], [1])[0].best == Setting(3)


def test_drafting_is_switched_off_where_it_stops_paying() -> None:
    found = costs(0.05)
    cold, hot = advise(found, [256], [0.0, 1.0], [1, 8, 32])
    assert 0 < hot.last < cold.last < 32
    for a in (cold, hot):
        gain = [
            max(found.speed_up(s, b, 256, a.temperature) for s in found.settings())
            for b in (a.last, a.last + 1)
        ]
        assert gain[0] > 1 >= gain[1]
    assert f"switch it off above batch {hot.last} to {cold.last}" in sentence([cold, hot])
    assert (
        sentence([cold])
        == f"use {cold.best.words} ({cold.best.options}); switch it off above batch {cold.last}"
    )


def test_useless_drafts_are_called_so() -> None:
    found = advise(costs(0.01, (0.0, 0.0, 0.0, 0.0)), [256], [0.0], [1])
    assert found[0].last == 0 and sentence(found).startswith("leave drafting off")
    assert "pays up to batch 32 everywhere" in sentence(advise(costs(0.0, draft=0.0), [256], [0.0], [1, 32]))
    assert "pays up to batch 2 everywhere" in sentence(advise(costs(0.0, draft=0.0), [256], [0.0], [1, 2]))


def test_where_drafting_loses_its_setting_does_not_count() -> None:
    good, bad = (
        advise(costs(0.01, reach), [256], [0.0], [1, 32])[0] for reach in ((0.8, 0.6, 0.5, 0.4), (0.0,) * 4)
    )
    assert (good.best, bad.best) == (CHAIN, Setting(1))
    for found in ([good, bad, bad], [bad, bad, good]):
        assert sentence(found).startswith(
            f"use {CHAIN.words} ({CHAIN.options}); switch it off above batch 0 to"
        )


def test_token_after_token_a_shorter_chain_costs_less() -> None:
    found = costs(0.01)
    for tokens in (1, 2, 3):
        del found.observed[Setting(tokens), 0.0]
    with_shorter_chains(found, CHAIN, shortest=0.25)
    assert [found.value(Setting(n), 0.0, "draft") for n in (1, 2, 3, 4)] == pytest.approx(
        [0.025, 0.05, 0.075, 0.1]
    )


def test_context_adds_to_both_sides() -> None:
    found = costs(0.01)
    found.verify.slope, found.draft_slope = {1: 0.001, 5: 0.001}, 0.01
    assert found.speed_up(CHAIN, 1, 8192, 0.0) < found.speed_up(CHAIN, 1, 256, 0.0)
    assert found.round_seconds(PLAIN, 2, SHORT + 100, 0.0) == pytest.approx(1.02 + 2 * 0.1)


def test_a_setting_counts_only_where_it_was_tried() -> None:
    found = costs(0.001)
    tree = Setting(4, 8)
    found.observed[tree, 0.0] = Observed(tree, 0.0, (0.9,) * 4, 0.1, 0.0, 0.1, 256, 460, 100)
    cold, hot = advise(found, [256], [0.0, 1.0], [1])
    assert cold.best == tree and hot.best != tree


def test_contexts() -> None:
    assert (
        contexts_up_to(8192) == [256, 1024, 2048, 4096, 8192]
        and contexts_up_to(512) == [256]
        and contexts_up_to(100) == [100]
    )
