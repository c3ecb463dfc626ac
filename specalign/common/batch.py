"""Packed rows, anchors, training steps and corrupted text."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class PackedRow:
    """Tokens, positions and number of their document (-1 = padding), answer flags, (L,)."""

    tokens_L: Tensor
    positions_L: Tensor
    document_L: Tensor
    answer_L: Tensor


@dataclass
class Batch:
    """B packed rows; the fields are those of `PackedRow`, stacked."""

    tokens_BL: Tensor
    positions_BL: Tensor
    document_BL: Tensor
    answer_BL: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(*(t.to(device) for t in vars(self).values()))

    def row(self, index: int) -> Batch:
        """One row, as a batch of one."""
        return Batch(*(t[index : index + 1] for t in vars(self).values()))

    def attention_mask(self) -> Tensor:
        """bool (B, 1, L, L): causal, within one document; a padding position sees itself alone."""
        length = self.tokens_BL.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens_BL.device).tril()
        same = self.document_BL[:, :, None] == self.document_BL[:, None, :]
        real = (self.document_BL >= 0)[:, None, :]
        own = torch.eye(length, dtype=torch.bool, device=self.tokens_BL.device)
        return ((causal & same & real) | own)[:, None]


@dataclass
class Anchors:
    """`index_BA`: where each block's clean token lies in its row; row k of the block predicts the
    token at index+1+k.

    `valid_BAK` marks the predictions that count: inside the anchor's document and its answer, with
    no gap before them.
    """

    index_BA: Tensor
    valid_BAK: Tensor

    @property
    def block_size(self) -> int:
        return self.valid_BAK.shape[2]

    def places_BAK(self, length: int) -> Tensor:
        """Row index of the target distribution for each drafted token: anchor + k, clamped."""
        return self.places(length, self.block_size)

    def places(self, length: int, count: int) -> Tensor:
        """Row index of each anchor and of those after it, clamped, (B, A, count)."""
        steps = torch.arange(count, device=self.index_BA.device)
        return (self.index_BA[..., None] + steps).clamp_max(length - 1)

    def blocks_BAK(self, tokens_BL: Tensor) -> Tensor:
        """The tokens of every block: those after its anchor; past the row's end its last token."""
        steps = torch.arange(1, self.block_size + 1, device=self.index_BA.device)
        places = (self.index_BA[..., None] + steps).clamp_max(tokens_BL.shape[1] - 1)
        return torch.gather(tokens_BL, 1, places.flatten(1)).view_as(places)


@dataclass
class Step:
    """The data of one process in one training micro-batch.

    scale: the sum of its losses times this, averaged over processes and micro-batches, is the
    step's mean loss per anchor. kind: the text's temperature, for validation (`greedy`, `sampling`,
    `other`). keys: which rows these are, training rows from 0 up, held-out ones from -1 down.
    places: where in the stream each row stands, from which its noise is drawn. written: whether the
    target wrote each row's text, without which it tells no τ; empty = all of them.
    """

    batch: Batch
    anchors: Anchors
    scale: float = 1.0
    kind: str = "other"
    keys: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    written: tuple[bool, ...] = ()

    def to(self, device: torch.device) -> Step:
        anchors = Anchors(self.anchors.index_BA.to(device), self.anchors.valid_BAK.to(device))
        return replace(self, batch=self.batch.to(device), anchors=anchors)


@dataclass
class Corrupted:
    """What a standalone drafter reads and has to undo: blocks (B, A, K) with times (B, A), or rows
    (B, L) with times (B,).

    `valid` marks the positions that noise could reach and the loss counts; `tokens_0` is the clean
    text. σ at every position is `schedule.total(times)[..., None]`. `importance`, shaped as
    `times`, multiplies the loss: how much more likely uniform times would have made this noise than
    the draw that did.
    """

    tokens_t: Tensor
    tokens_0: Tensor
    times: Tensor
    valid: Tensor
    importance: Tensor
