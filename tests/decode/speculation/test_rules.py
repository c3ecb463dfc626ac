"""Acceptance at its edges, and the lossy rules."""

import math

import pytest
import torch

from decode.speculation.proposal import Proposal
from decode.speculation.rules import Drafts, select_path
from decode.speculation.verifiers import TYPICAL_DELTA, TYPICAL_EPSILON, top_beta, typical


def test_self_selection_accepts_nothing_off_its_path() -> None:
    """Of two siblings the likelier one is tested, and the other is not, though p would take it."""
    for tokens, stop in (([0, 1], [0.5, 0.5, 0.0]), ([1, 0], [0.5, 0.0, 0.5])):
        drafts = Drafts.of([Proposal(torch.tensor(tokens), "point", parents=(-1, -1))], 3)
        found = select_path(torch.tensor([[[0.5, 0.3, 0.2]] * 3]), drafts)
        assert found.stop_BM[0].tolist() == pytest.approx(stop)
        assert found.rest_BMV[0, 0].tolist() == pytest.approx([0.0, 0.3, 0.2])


P = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04])
FLAT = torch.tensor([0.2, *[0.075] * 8, 0.05, 0.05, 0.05, 0.03, 0.02])
"""Here the entropy decides: its threshold, δ·exp(−H), is 0.025."""


@pytest.mark.parametrize("token", range(14))
def test_the_typical_threshold_falls_with_entropy(token: int) -> None:
    drafts = Drafts.of([Proposal(torch.tensor([token]), "point")], 14)
    assert typical(FLAT.expand(1, 2, 14), drafts).stop_BM[0, 1] == (token < 13)


@pytest.mark.parametrize("token", range(5))
def test_a_draft_is_accepted_by_p_alone(token: int) -> None:
    """Typical: above min(ε, δ·exp(−H(p))); top-β: among the three most probable. Accepted for certain, or not at all."""
    drafts = Drafts.of([Proposal(torch.tensor([token]), "point")], 5)
    entropy = -sum(p * math.log(p) for p in P.tolist())
    least = min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))
    p_BMV = P.expand(1, 2, 5)
    assert typical(p_BMV, drafts).stop_BM[0].tolist() == [P[token] <= least, P[token] > least]
    found = top_beta(p_BMV, drafts)
    assert found.stop_BM[0].tolist() == [token >= 3, token < 3]
    assert torch.equal(found.rest_BMV[0, 0], P)  # a rejected draft is not taken out
