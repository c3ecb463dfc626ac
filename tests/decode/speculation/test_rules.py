"""Acceptance at its edges, and the lossy rules."""

from __future__ import annotations

import math

import pytest
import torch

from decode.speculation.lossy_rules import TYPICAL_DELTA, TYPICAL_EPSILON, top_beta, typical
from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Drafts, accept_probability, select_path
from decode.speculation.verifiers import VERIFIERS, run_verifier


def test_acceptance_at_the_edges() -> None:
    p, q = torch.tensor([0.0, 0.0, 0.5, 0.5, 0.2]), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.8])
    assert accept_probability(p, q).tolist() == pytest.approx([0, 0, 1, 1, 0.25])


def test_p_equal_to_q_accepts_everything_and_rounding_leaves_no_nan() -> None:
    row = torch.rand(4) ** 2
    p_BMV = (row / row.sum()).expand(1, 3, 4)
    proposal = Proposal(torch.tensor([0, 3]), "independent", DraftProbs(p_BMV[0, :2]))
    generator = torch.Generator().manual_seed(0)
    for name in ("token", "block", "recursive", "traversal", "k_seq", "hybrid"):
        assert all(
            int(run_verifier(name, [proposal], p_BMV, [generator]).end_B) == 2 for _ in range(20)
        )
        out = VERIFIERS[name].rule(p_BMV, Drafts.of([proposal], 4))  # type: ignore[misc]
        assert bool(out.rest_BMV.isfinite().all())


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


def test_a_token_without_probability_is_never_accepted() -> None:
    p_BMV = torch.tensor([1.0, 0.0, 0.0]).expand(1, 2, 3)
    drafts = Drafts.of([Proposal(torch.tensor([2]), "point")], 3)
    for rule in (typical, top_beta):
        assert rule(p_BMV, drafts).stop_BM[0].tolist() == [1.0, 0.0]
