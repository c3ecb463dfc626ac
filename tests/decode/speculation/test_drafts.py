"""Proposals of several requests as one batch."""

from __future__ import annotations

import pytest
import torch

from decode.speculation.drafts import Drafts, rows_at
from decode.speculation.proposal import NO_DRAFTS, DraftProbs, Proposal

Q = torch.tensor([[0.2, 0.3, 0.5, 0.0]] * 3)


def tree(siblings: str = "without_replacement") -> Proposal:
    return Proposal(
        torch.tensor([2, 1, 0]),
        "independent",
        DraftProbs(Q),
        parents=(-1, -1, 0),
        siblings=siblings,  # type: ignore[arg-type]
    )


CHAIN = Proposal(torch.tensor([1, 2]), "independent", DraftProbs(Q[:2]))


def test_smaller_ones_are_padded_and_not_live() -> None:
    both = Drafts.of([tree(), CHAIN], 4)
    assert both.size == 3 and not both.whole and not both.chains
    assert both.tokens_BN.tolist() == [[2, 1, 0], [1, 2, 0]]
    assert both.live().tolist() == [[True] * 3, [True, True, False]]
    assert both.above()[0].tolist() == [0, 0, 1] and both.above()[1, :2].tolist() == [0, 1]
    assert bool((both.q()[1, 2] == 0).all())
    assert bool((Drafts.of([tree(), NO_DRAFTS], 4).q()[1] == 0).all())
    alone = Drafts.of([CHAIN], 4)
    assert alone.chains and alone.whole and alone.steps_BN is None


def test_laws_and_siblings_do_not_mix() -> None:
    with pytest.raises(ValueError, match="different laws"):
        Drafts.of([CHAIN, Proposal(torch.tensor([1]), "point")], 4)
    with pytest.raises(ValueError, match="kinds of siblings"):
        Drafts.of([tree(), tree("iid")], 4)


def test_a_later_sibling_was_drawn_from_what_was_left() -> None:
    both = Drafts.of([tree(), CHAIN], 4)
    above = both.above()
    torch.testing.assert_close(both.q_BV(0, above)[0], Q[0])
    left = both.q_BV(1, above)
    torch.testing.assert_close(
        left[0], torch.tensor([0.4, 0.6, 0.0, 0.0])
    )  # without its sibling, token 2
    torch.testing.assert_close(left[1], Q[0])  # in the chain it has no sibling
    each = both.q_BV(torch.tensor([1, 0]), above)
    torch.testing.assert_close(each[0], left[0])
    iid = Drafts.of([tree("iid")], 4)
    torch.testing.assert_close(iid.q_BV(1, iid.above())[0], Q[0])


def test_rows_of_every_request() -> None:
    block = torch.arange(24.0).view(2, 3, 4)
    assert torch.equal(
        rows_at(block, torch.tensor([2, 0])), torch.stack((block[0, 2], block[1, 0]))
    )
    at = torch.tensor([[0, 2], [1, 1]])
    assert torch.equal(rows_at(block, at), torch.stack([block[b, at[b]] for b in range(2)]))
