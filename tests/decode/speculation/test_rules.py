"""Acceptance at its edges."""

from __future__ import annotations

import pytest
import torch

from decode.speculation.proposal import DraftProbs, Proposal
from decode.speculation.rules import Drafts, Rule, accept_probability, block, selected, token
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
        assert all(int(run_verifier(name, [proposal], p_BMV, [generator]).end_B) == 2 for _ in range(20))
        out = VERIFIERS[name].rule(p_BMV, Drafts.of([proposal], 4))  # type: ignore[misc]
        assert bool(out.rest_BMV.isfinite().all())


def test_self_selection_accepts_nothing_off_its_path() -> None:
    """Of two siblings the likelier one is tested, and the other is not, though p would take it."""
    for tokens, stop in (([0, 1], [0.5, 0.5, 0.0]), ([1, 0], [0.5, 0.0, 0.5])):
        drafts = Drafts.of([Proposal(torch.tensor(tokens), "point", parents=(-1, -1))], 3)
        found = selected(torch.tensor([[[0.5, 0.3, 0.2]] * 3]), drafts)
        assert found.stop_BM[0].tolist() == pytest.approx(stop)
        assert found.rest_BMV[0, 0].tolist() == pytest.approx([0.0, 0.3, 0.2])


@pytest.mark.parametrize("rule", [token, block])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_q_over_some_tokens_is_verified_as_over_all(rule: Rule, dtype: torch.dtype) -> None:
    """To the bit, for tokens that q can't propose and rows that are broken too."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randperm(40, generator=generator)[:9]
        p_BMV = torch.rand(2, 4, 40, generator=generator, dtype=dtype).pow(4)
        p_BMV /= p_BMV.sum(-1, keepdim=True)
        proposals = []
        for b in range(2):
            q = torch.rand(3, 9, generator=generator, dtype=dtype).pow(4)
            q /= q.sum(1, keepdim=True)
            if seed % 3 == 0:
                q[1 + b] = torch.nan
            tokens = ids[torch.randint(0, 9, (3,), generator=generator)]
            if seed % 5 == 0:
                tokens[b] = next(i for i in range(40) if i not in ids)
            proposals.append(Proposal(tokens, "causal", DraftProbs(q, ids)))
        narrow = Drafts.of(proposals, 40)
        assert narrow.narrow is not None
        wide = Drafts(narrow.tokens_BN, narrow.parents, narrow.q())
        for one, other in zip(rule(p_BMV, narrow), rule(p_BMV, wide), strict=True):
            assert torch.equal(one, other)


def test_q_over_different_tokens_is_made_dense() -> None:
    some = DraftProbs(torch.full((2, 3), 1 / 3), torch.tensor([0, 2, 4]))
    other = DraftProbs(torch.full((2, 3), 1 / 3), torch.tensor([1, 2, 3]))
    chains = [Proposal(torch.tensor([2, 2]), "independent", q) for q in (some, other)]
    drafts = Drafts.of(chains, 5)
    assert drafts.narrow is None
    assert torch.equal(drafts.q(), torch.stack([some.dense(5), other.dense(5)]))
    shorter = Drafts.of([chains[0], Proposal(torch.tensor([2]), "independent", some.take(slice(1)))], 5)
    assert shorter.narrow is None and shorter.q().shape == (2, 2, 5)
