"""A preallocated key/value cache: writing advances a length, rolling back reduces it, nothing is
copied. Recurrent states are rolled back by snapshots instead (`specalign.lm.recurrent`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from specalign.lm.recurrent import Recurrence
from specalign.lm.slabs import Block, IndexedSlab, LayerShape, MixedSlab, Slab

if TYPE_CHECKING:
    from specalign.kernels.layers import Memory


class Slots(NamedTuple):
    """Where a forward pass over rows of different lengths writes, and what it reads.

    row_B1: 0 … B − 1. at_BL: the cache entries of the new tokens. end: entries 0 … end − 1 are
    read. positions_BS: the position of each of them; None = its index.
    """

    row_B1: Tensor
    at_BL: Tensor
    end: int
    positions_BS: Tensor | None = None


class KVCache(Cache):
    """A model's keys and values, allocated once; the first `length` positions count.

    `cache.length = n` with n ≤ the current length rolls back. With `slots` set, rows have different
    lengths: a forward pass writes where the slots say, and the length does not change.

    Args:
        shapes: of each layer; None = it caches no keys.
        others: by layer, transformers' own cache layer unless it is plain attention.

    views: its memory as kernels read it, by layers: cleared when that moves. recurrence: its
    recurrent states, if any.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | None],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        others: Mapping[int, object] | None = None,
    ) -> None:
        self._length = self._end = 0
        self.rows, self.capacity = rows, capacity
        self._make = (shapes, dtype, device)
        self.slots: Slots | None = None
        self.views: dict[tuple[int, ...] | None, Memory] = {}
        layers: list[Any] = []
        for i, shape in enumerate(shapes):
            other = (others or {}).get(i)
            if shape is None:
                layers.append(other)
            elif isinstance(other, LinearAttentionLayer):
                layers.append(MixedSlab(self, other.number_of_states))
            else:
                layers.append(IndexedSlab(self) if shape.indexer else Slab(self))
        self._blocks: list[Block] = []
        for shape in dict.fromkeys(s for s in shapes if s is not None):
            same = [layer for layer, its in zip(layers, shapes, strict=True) if its == shape]
            self._blocks.append(Block(same, shape, rows, capacity, dtype, device))
        self.slabs = layers
        recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        self.recurrence = Recurrence(recurrent) if recurrent else None
        Cache.__init__(self, layers=list(layers))

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        if not 0 <= value <= self._length:
            raise ValueError(f"a cache is only rolled back: {value} is not in 0..{self._length}")
        self._length = self._end = value
        self._note_change(value)
        if self.recurrence is not None:
            self.recurrence.roll_back(value)

    def _note_change(self, start: int) -> None:
        for view in self.views.values():
            view.roll_back(start)

    def write(self, memory: Tensor, new: Tensor) -> Tensor:
        """Write new keys or values, (B, H, L, width), into memory; returns all up to them."""
        if self.slots is None:
            end = self._length + new.shape[2]
            memory[:, :, self._length : end] = new
        else:
            memory[self.slots.row_B1, :, self.slots.at_BL] = new.transpose(1, 2)
            self._note_change(0)
            end = self.slots.end
        self._end = end
        return memory[:, :, :end]

    @property
    def end(self) -> int:
        """The end of what layers have written; between forward passes the length."""
        return max(self._length, self._end)

    def advance(self, tokens: int) -> None:
        """Add `tokens` positions, already written, to the length."""
        self._length += tokens
        self._end = self._length

    def check_room(self, tokens: int) -> None:
        """Raises ValueError when `tokens` more positions would not fit."""
        if self._length + tokens > self.capacity:
            raise ValueError(
                f"cache of {self.capacity} positions is full: {self._length} + {tokens}"
            )

    def k(self, layer: int) -> Tensor:
        """(B, Hkv, length, width) view of the layer's keys, rotary positions already applied."""
        return self.slabs[layer].keys[:, :, : self._length]

    def v(self, layer: int) -> Tensor:
        """(B, Hkv, length, width) view of the layer's values."""
        return self.slabs[layer].values[:, :, : self._length]

    def row(self, index: int) -> KVCache:
        """An empty one-row cache in the memory of one row; not for recurrent states."""
        shapes, dtype, device = self._make
        view = KVCache(shapes, 1, 0, dtype, device)
        view.capacity = self.capacity
        for block, own in zip(view._blocks, self._blocks, strict=True):
            block.use([part[:, :, index : index + 1] for part in own.parts])
        return view

    def move_rows(self, from_BL: Tensor, to_BL: Tensor) -> None:
        """Copy entries of every row, (B, L) → (B, L)."""
        rows_B1 = torch.arange(self.rows, device=to_BL.device)[:, None]
        for block in self._blocks:
            for part in block.parts:
                part[:, :, rows_B1, :, to_BL] = part[:, :, rows_B1, :, from_BL]
        self._note_change(0)

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, in that order."""
        self.views.clear()
        for block in self._blocks:
            block.select(rows)
        if self.recurrence is not None:
            self.recurrence.select(rows)

    def keep(self, start: int, offsets: Sequence[int]) -> None:
        """Roll back to one path of a tree: of the positions written from `start` on, keep those at
        the ascending `offsets`, made contiguous."""
        count = len(offsets)
        if list(offsets) != list(range(count)):
            self._note_change(start)
            for block in self._blocks:
                block.move(start, offsets)
        self.length = start + count

    def fill(self, source: KVCache) -> None:
        """Copy the one-row `source` to the start of every row; the length does not change."""
        self._note_change(0)
        for block, other in zip(self._blocks, source._blocks, strict=True):
            for mine, its in zip(block.parts, other.parts, strict=True):
                mine[..., : source.length, :] = its[..., : source.length, :]
        if self.recurrence is not None and source.recurrence is not None:
            self.recurrence.fill(source.recurrence, self.rows)

    def rewind(self) -> Tensor | None:
        """Back to what recurrent states have seen. Returns the tokens (B, R) to run again."""
        if self.recurrence is None:
            return None
        lost = self.recurrence.take_lost()
        if lost is not None:
            self._length = self._end = self.recurrence.at
            self._note_change(self._length)
        return lost


class Parts(NamedTuple):
    """Keys or values of several requests in one forward pass, and the new tokens of each."""

    tensors: list[Tensor]
    widths: list[int]


class _SharedSlab(Slab):
    """One layer of `SharedCache`."""

    def __init__(self, owner: SharedCache, layer: int) -> None:
        super().__init__(owner)
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Any:
        caches, widths = self.owner.caches, self.owner.widths
        new = (key_states.split(widths, dim=2), value_states.split(widths, dim=2))
        pairs = [c.slabs[self.layer].update(k, v) for c, k, v in zip(caches, *new, strict=True)]
        keys, values = ([pair[i] for pair in pairs] for i in range(2))
        return Parts(keys, widths), Parts(values, widths)


class SharedCache(Cache):
    """One-row caches of several requests, for one forward pass over their concatenated new tokens,
    `widths` of each: attention is per request, and nothing is padded."""

    length = 0
    capacity = -1

    def __init__(self, caches: Sequence[KVCache], widths: list[int]) -> None:
        self.caches, self.widths = list(caches), widths
        slabs = enumerate(caches[0].slabs)
        super().__init__(
            layers=[_SharedSlab(self, i) if isinstance(slab, Slab) else slab for i, slab in slabs]
        )
