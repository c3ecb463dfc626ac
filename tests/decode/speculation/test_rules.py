"""Acceptance at its edges."""

from __future__ import annotations

import pytest
import torch

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
