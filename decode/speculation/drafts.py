"""Proposals of several requests as one batch of tensors, the input of a verification rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decode.speculation.proposal import Proposal
from decode.speculation.tree import Forest, chain, parent_rows, sizes


@dataclass(frozen=True)
class Drafts:
    """Trees of B requests, all of one law; smaller ones are padded with nodes that no rule accepts.

    tokens_BN: int64. parents: per request, as in `Proposal`. q_BNV: None for point drafts.
    steps_BN: of the law `unmasked`. without_replacement: siblings were drawn so; else each without
    looking at the others (`k_seq`: all from one q).
    """

    tokens_BN: Tensor
    parents: Forest
    q_BNV: Tensor | None = None
    steps_BN: Tensor | None = None
    without_replacement: bool = False

    @classmethod
    def of(cls, proposals: Sequence[Proposal], vocab_size: int) -> Drafts:
        some = [x.q for x in proposals if x.q is not None]
        qs = [(some[0].take(slice(0)) if x.q is None else x.q) for x in proposals if some]
        steps = [x.tokens_K[:0] if x.steps_K is None else x.steps_K for x in proposals]
        unmasked = any(x.steps_K is not None for x in proposals)
        return cls(
            stack_rows([x.tokens_K for x in proposals]),
            tuple(x.tree for x in proposals),
            stack_rows([q.dense(vocab_size) for q in qs]) if qs else None,
            stack_rows(steps) if unmasked else None,
            any(x.siblings == "without_replacement" for x in proposals),
        )

    @property
    def size(self) -> int:
        """N, padding included."""
        return self.tokens_BN.shape[1]

    @property
    def chains(self) -> bool:
        """No tree branches."""
        return all(x == chain(len(x)) for x in self.parents)

    @property
    def whole(self) -> bool:
        """No padding."""
        return all(len(x) == self.size for x in self.parents)

    def above(self) -> Tensor:
        """(B, N): the row of p at each token's parent, 0 = the root."""
        return parent_rows(self.parents, self.size, self.tokens_BN.device)

    def live(self) -> Tensor:
        """Bool (B, N): real nodes."""
        device = self.tokens_BN.device
        return torch.arange(self.size, device=device) < sizes(self.parents, device)[:, None]

    def q(self) -> Tensor:
        assert self.q_BNV is not None, "drafts of this law carry their q"
        return self.q_BNV

    def q_BV(self, i: int | Tensor, above_BN: Tensor) -> Tensor:
        """What token i (one for all, or one per request (B,)) was drawn from, without its earlier
        siblings where they were drawn without replacement; NaN, which no rule accepts, where
        nothing is left."""
        q_BNV = self.q()
        batch = torch.arange(len(above_BN), device=above_BN.device)
        i_B = torch.full_like(batch, i) if isinstance(i, int) else i
        q_BV = q_BNV[:, i] if isinstance(i, int) else rows_at(q_BNV, i_B)
        if not self.without_replacement:
            return q_BV
        earlier_BN = above_BN == above_BN[batch, i_B][:, None]
        earlier_BN &= torch.arange(self.size, device=i_B.device) < i_B[:, None]
        gone_BV = (
            torch.zeros_like(q_BV).scatter_add_(1, self.tokens_BN, earlier_BN.to(q_BV.dtype)) > 0
        )
        left_BV = q_BV.masked_fill(gone_BV, 0.0)
        return torch.where(earlier_BN.any(1, keepdim=True), normalise(left_BV), q_BV)


def rows_at(block_BMV: Tensor, at: Tensor) -> Tensor:
    """Row `at` of every request, (B, V) for (B,), or rows, (B, N, V) for (B, N). Indexing by
    [batch, at] is several times slower."""
    B, M, V = block_BMV.shape
    first_B = torch.arange(B, device=at.device) * M
    flat = at + (first_B if at.dim() == 1 else first_B[:, None])
    return block_BMV.flatten(0, 1).index_select(0, flat.flatten()).view(*at.shape, V)


def stack_rows(blocks: Sequence[Tensor]) -> Tensor:
    """Rows (M, …) of several requests as (B, M, …), zeros below those of one that has fewer."""
    return blocks[0][None] if len(blocks) == 1 else pad_sequence(list(blocks), batch_first=True)


def normalise(weights_BV: Tensor) -> Tensor:
    return weights_BV / weights_BV.sum(-1, keepdim=True)


def put_rows(block_BMV: Tensor, at_B: Tensor, rows_BV: Tensor) -> None:
    """Write row `at_B` of every request of the contiguous `block_BMV`, in its dtype."""
    B, M, V = block_BMV.shape
    flat_B = at_B + torch.arange(B, device=at_B.device) * M
    block_BMV.view(B * M, V).index_copy_(0, flat_B, rows_BV.to(block_BMV.dtype))


def pick_tokens(rows_BV: Tensor, tokens_B: Tensor) -> Tensor:
    return rows_BV.gather(1, tokens_B[:, None])[:, 0]
