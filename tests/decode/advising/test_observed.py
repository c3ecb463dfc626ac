"""What is made of finished requests."""

from __future__ import annotations

import pytest

from decode.advising.observed import PLAIN, Observed, Setting, summary
from decode.advising.rounds import Rounds
from decode.engine.output import Generation, Tree

ROUNDS = Rounds()
ROUNDS.between |= {1: [0.1, 0.21, 0.9], 4: [0.3]}


def request(accepted: list[int], drafted: int = 3, trees: list[Tree | None] | None = None) -> Generation:
    calls = len(accepted)
    return Generation(
        [0] * (1 + sum(accepted) + calls), "", 10, "length", calls, [drafted] * calls, trees or [None] * calls, accepted,
        seconds=1.0, draft_seconds=0.2 * calls, verify_seconds=0.05 * calls,
    )  # fmt: skip


def test_reach_tau_and_costs_a_call() -> None:
    seen = summary([request([0, 1, 3]), request([2])], Setting(3), 0.5, ROUNDS, 4)
    assert seen.reach == (0.75, 0.5, 0.25) and seen.tau == 1 + 6 / 4
    assert (seen.draft, seen.host) == (pytest.approx(0.2), pytest.approx(0.01))
    assert seen.further == pytest.approx((0.3 - 0.21) / 3)
    assert seen.tau == 1 + sum(seen.reach)


def test_without_rounds_of_its_own_a_batch_costs_what_its_requests_do() -> None:
    seen = summary([request([1], 2, [Tree((-1, -1, 0), [0])])], Setting(3, 3), 0.0, Rounds(), 2)
    assert (seen.draft, seen.host, seen.further) == (0.2, 0.0, 0.2) and seen.setting.rows == 4


def test_shorter_chains_accept_the_beginning() -> None:
    seen = Observed(Setting(3), 0.0, (0.8, 0.5, 0.2), 0, 0, 0, 10, 250, 100)
    assert [seen.tau_of(n) for n in (1, 2, 3)] == pytest.approx([1.8, 2.3, 2.5])
    cut = Observed(Setting(3), 0.0, (0.8, 0.5, 0.2), 0, 0, 0, 10, 240, 100)  # at the ends of texts
    assert cut.tau_of(3) == pytest.approx(2.4) and cut.tau_of(1) == pytest.approx(1.7)


def test_words() -> None:
    assert (PLAIN.rows, Setting(4).rows, Setting(4, 8).rows) == (1, 5, 9)
    assert Setting(4).options == "--draft-tokens 4 --tree-nodes 0" and Setting(4, 8).words == "a tree of 8"
