"""Rounds of every verifier at logits alone: the right ones keep the law of p, and each bug planted for them shows."""

from __future__ import annotations

import pytest
import torch

from decode.losslessness import rounds
from decode.losslessness.planted import CHAINS, Bug
from decode.losslessness.rounds import RULES, rounds_check, table_of
from decode.losslessness.widened import BUGS

TABLE = table_of(torch.randn(4, 60, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(autouse=True)
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "WIDE", rounds.WIDE._replace(draws=300))
    monkeypatch.setattr(rounds, "WEAK", [3])
    monkeypatch.setattr(rounds, "AGAIN", 4)


OWN = [bug for bug in BUGS if bug.check == "rounds"]


@pytest.mark.slow
@pytest.mark.parametrize("verifier", RULES)
def test_a_right_verifier_keeps_the_law(verifier: str) -> None:
    check = rounds_check(verifier, TABLE, 0, 1e-4)
    assert check.passed and check.figures["drafted"], check.words


@pytest.mark.slow
@pytest.mark.parametrize("bug", OWN, ids=lambda bug: bug.name)
def test_a_bug_of_a_rule_shows(bug: Bug) -> None:
    check = rounds_check("block" if bug.verifiers == CHAINS else "recursive", TABLE, 0, 1e-4, bug.planted)
    assert not check.passed, check.words
