"""The forward process of block drafters: a clean anchor, then K−1 absorbed positions, at random places of a row.

Every anchor sees the clean text before it; its own block holds the anchor token and masks (DFlash, arXiv 2602.06036:
anchor clean, rest masked, context strictly before the anchor, blocks invisible to each other).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from align.data import Batch


@dataclass
class Anchors:
    """`index_BA`: where each block's clean token lies in its row; row k of the block predicts the token at index+1+k.

    `valid_BAK` marks the predictions that count: inside the anchor's document and its answer, with no gap before them.
    """

    index_BA: Tensor
    valid_BAK: Tensor

    @property
    def block_size(self) -> int:
        return self.valid_BAK.shape[2]

    def places_BAK(self, length: int) -> Tensor:
        """Row index of the position whose target distribution predicts each drafted token: anchor + k, kept in range."""
        steps = torch.arange(self.block_size, device=self.index_BA.device)
        return (self.index_BA[..., None] + steps).clamp_max(length - 1)


def sample_anchors(batch: Batch, count: int, block_size: int, generator: torch.Generator) -> Anchors:
    """`count` distinct anchors a row, uniformly among those whose first drafted token belongs to an answer.

    A row with fewer places repeats one with nothing valid in it. An anchor is never a document's first token: the
    drafter needs the target's hidden state before it.
    """
    length = batch.tokens_BL.shape[1]
    same_next = torch.zeros_like(batch.answer_BL)
    same_next[:, :-1] = (batch.document_BL[:, 1:] == batch.document_BL[:, :-1]) & batch.answer_BL[:, 1:]
    allowed = same_next & (batch.positions_BL > 0) & (batch.document_BL >= 0)
    noise = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1.0)
    top = noise.topk(min(count, length), dim=1)
    index = top.indices.sort(dim=1).values
    real = torch.gather(allowed, 1, index)
    steps = index[..., None] + 1 + torch.arange(block_size)
    inside = steps < length
    steps = steps.clamp_max(length - 1)
    flat = steps.flatten(1)
    document = torch.gather(batch.document_BL, 1, flat).view_as(steps)
    answer = torch.gather(batch.answer_BL, 1, flat).view_as(steps)
    own = torch.gather(batch.document_BL, 1, index)[..., None]
    valid = (inside & answer & (document == own) & real[..., None]).long().cumprod(-1).bool()
    return Anchors(index, valid)
