"""Packed rows, anchors, training steps and corrupted text."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a dataclass of tensors, and of the dataclasses in it, with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed = {f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)}
    return replace(value, **changed)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for one of pinned memory to a GPU."""
    return tensor.to(device, non_blocking=device.type != "cpu")


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
        changed: Batch = map_tensors(self, lambda tensor: send(tensor, device))
        return changed

    def row(self, index: int) -> Batch:
        """One row, as a batch of one."""
        return Batch(*(t[index : index + 1] for t in vars(self).values()))

    def documents(self) -> Iterator[tuple[int, Tensor]]:
        """The row and the places of every document."""
        for row, document_L in enumerate(self.document_BL):
            for number in [n for n in document_L.unique().tolist() if n >= 0]:
                yield row, (document_L == number).nonzero()[:, 0]

    def digests(self) -> tuple[str, ...]:
        """A hash of each row's text and layout."""
        parts = (self.tokens_BL, self.positions_BL, self.document_BL)
        rows_BN = torch.cat([t.to("cpu", torch.int64) for t in parts], dim=1).numpy()
        return tuple(hashlib.sha256(row.tobytes()).hexdigest()[:32] for row in rows_BN)

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
class UsedPlaces:
    """The places of a text whose p some valid drafted position imitates.

    flat_P: flat places b·L + i, ascending. index_BAK: where in `flat_P` the place of each drafted
    position is; that of an earlier position where not valid. host_R: the same on the host, flat.
    """

    flat_P: Tensor
    index_BAK: Tensor
    host_R: np.ndarray

    @classmethod
    def find(cls, anchors: Anchors, length: int, fixed: bool = False) -> UsedPlaces:
        """Those of blocks in rows of `length`; one place if no position is valid. fixed: repeat the
        last place up to a multiple of an eighth of the most that there can be."""
        valid_BAK = anchors.valid_BAK
        rows, count, size = valid_BAK.shape
        offsets = torch.arange(rows, device=valid_BAK.device)[:, None, None] * length
        flat_BAK = anchors.places_BAK(length) + offsets
        flat_P = (flat_BAK[valid_BAK] if bool(valid_BAK.any()) else flat_BAK.flatten()[:1]).unique()
        # the last valid position up to each one stands for those that are not valid
        steps_R = torch.arange(valid_BAK.numel(), device=valid_BAK.device)
        last_R = steps_R.masked_fill(~valid_BAK.flatten(), 0).cummax(0).values
        index_R = torch.searchsorted(flat_P, flat_BAK.flatten()[last_R]).clamp_max(len(flat_P) - 1)
        if fixed:
            part = -(-rows * min(length, count * size) // 8)
            flat_P = torch.cat((flat_P, flat_P[-1:].expand(-len(flat_P) % part)))
        # a copy: a tensor's memory moves on its way between processes
        return cls(flat_P, index_R.view_as(flat_BAK), np.array(index_R.cpu()))


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


@dataclass
class MaskedPositions:
    """The R positions of a `Corrupted` that hold masks and count, flat. For blocks, own_U: the
    distinct places of those positions in `UsedPlaces.flat_P`; where_R: the place of each in
    `own_U`."""

    at_R: Tensor
    own_U: Tensor | None = None
    where_R: Tensor | None = None


@dataclass
class Step:
    """The data of one process in one training micro-batch.

    scale: the sum of its losses times this, averaged over processes and micro-batches, is the
    step's mean loss per anchor. kind: the text's temperature, for validation (`greedy`, `sampling`,
    `other`). keys: which rows these are, training rows from 0 up, held-out ones from -1 down.
    places: where in the stream each row stands, from which its noise is drawn. written_B: whether
    the target wrote each row's text, without which it tells no τ; None = all of them. clean_BA: how
    many tokens after its anchor each block shows; None = none. digests: of the rows, if the
    target's outputs are kept. states_BLFD: of the target's layers, from a server. noisy, masked:
    what a standalone drafter is trained to undo.
    """

    batch: Batch
    anchors: Anchors
    scale: float = 1.0
    kind: str = "other"
    keys: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    written_B: Tensor | None = None
    clean_BA: Tensor | None = None
    digests: tuple[str, ...] = ()
    states_BLFD: Tensor | None = None
    noisy: Corrupted | None = None
    masked: MaskedPositions | None = None

    @cached_property
    def used(self) -> UsedPlaces:
        """Found on the host: a device would wait for the number of places."""
        return UsedPlaces.find(self.anchors, self.batch.tokens_BL.shape[1])

    def to(self, device: torch.device) -> Step:
        return self._map(lambda tensor: send(tensor, device))

    def pin_memory(self) -> Step:
        """A copy in pinned memory; DataLoader calls it."""
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Step:
        changed: Step = map_tensors(self, change)
        changed.used = map_tensors(self.used, change)
        return changed
