"""A preallocated key/value cache: writing advances a length, rolling back reduces it, nothing is
copied. Recurrent states are rolled back by snapshots instead (`specalign.lm.recurrent`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from specalign.lm.recurrent import Recurrence

if TYPE_CHECKING:
    from specalign.kernels.layers import Memory


class LayerShape(NamedTuple):
    """The shape of what a layer caches per token: heads, widths of key and value, and of an
    indexer's key."""

    heads: int
    key: int
    value: int
    indexer: int = 0

    @property
    def numbers(self) -> int:
        return self.heads * (self.key + self.value) + self.indexer


class Slab(CacheLayerMixin):
    """One layer's keys and values, (B, Hkv, capacity, width), written at the cache's length."""

    keys: Tensor
    values: Tensor
    owner: Any
    is_sliding = False

    def __init__(self, owner: KVCache | SharedCache) -> None:
        super().__init__()
        self.owner = owner
        self.is_initialized = True  # nothing is allocated later

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        return self.owner.write(self.keys, key_states), self.owner.write(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.capacity


class IndexedSlab(Slab):
    """A layer whose indexer selects keys by its own keys, (B, 1, capacity, width)."""

    index: Tensor
    _positions: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:  # of DeepSeek-V3.2
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:  # of MiniMax-M3
        return self.owner.write(self.index, idx_k)

    def get_seq_length(self) -> int:  # with the tokens of this pass, once written (GLM-5)
        return self.owner.end

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions (…, B, S), where a model stores them here (Qwen4)."""
        return None if self._positions is None else self._positions[..., : self.owner.length]

    @indexer_position_ids.setter
    def indexer_position_ids(self, value: Tensor | None) -> None:
        self._positions = value


class MixedSlab(LinearAttentionLayer, Slab):  # type: ignore[override]
    """A layer that attends and has a recurrent state too."""

    is_compileable = False

    def __init__(self, owner: KVCache, states: int) -> None:
        Slab.__init__(self, owner)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def get_max_length(self) -> int:
        return Slab.get_max_length(self)


class Block:
    """The memory of all layers of one shape, so moving positions is one operation."""

    def __init__(
        self, slabs: Sequence[Slab], shape: LayerShape, size: tuple[int, int], empty: Tensor
    ) -> None:
        rows, capacity = size

        def zeros(parts: int, width: int, heads: int = shape.heads) -> Tensor:
            return empty.new_zeros(len(slabs), parts, rows, heads, capacity, width)

        self.slabs = list(slabs)
        same = shape.key == shape.value
        self.parts = [zeros(2, shape.key)] if same else [zeros(1, shape.key), zeros(1, shape.value)]
        self.values = len(self.parts) - 1
        if shape.indexer:
            self.parts.append(zeros(1, shape.indexer, heads=1))
        self._point()

    def _point(self) -> None:
        for i, slab in enumerate(self.slabs):
            slab.keys, slab.values = self.parts[0][i, 0], self.parts[self.values][i, -1]
            if isinstance(slab, IndexedSlab):
                slab.index = self.parts[-1][i, 0]

    def select(self, rows: Tensor) -> None:
        for part in self.parts:
            for layer in part:  # one at a time to save memory
                layer[:, : len(rows)] = layer[:, rows]
        self.parts = [part[:, :, : len(rows)] for part in self.parts]
        self._point()

    def move(self, start: int, offsets: Sequence[int]) -> None:
        kept = torch.tensor(offsets, device=self.parts[0].device) + start
        for part in self.parts:
            part[..., start : start + len(offsets), :] = part.index_select(-2, kept)


class KVCache(Cache):
    """A model's keys and values, allocated once; the first `length` positions count.

    `cache.length = n` with n ≤ the current length rolls back. With `slots_B` set, (B,), a forward
    pass over one token per row writes row b at `slots_B[b]` instead (rows of different lengths).

    shapes: of each layer; None = it caches no keys. others: by layer, transformers' own cache layer
    unless it is plain attention. views: its memory as kernels read it, by layers: cleared when that
    moves. recurrence: its recurrent states, if any.
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
        self.slots_B: Tensor | None = None
        self.slots_end = 0
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
        empty = torch.empty(0, dtype=dtype, device=device)
        for shape in dict.fromkeys(s for s in shapes if s is not None):
            same = [layer for layer, its in zip(layers, shapes, strict=True) if its == shape]
            self._blocks.append(Block(same, shape, (rows, capacity), empty))
        recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        self.recurrence = Recurrence(recurrent) if recurrent else None
        self.slabs = layers
        Cache.__init__(self, layers=layers)

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
        if self.slots_B is None:
            end = self._length + new.shape[2]
            memory[:, :, self._length : end] = new
        else:  # one token per row, each at its own position
            memory[torch.arange(len(new), device=new.device), :, self.slots_B] = new[:, :, 0]
            self._note_change(0)
            end = self.slots_end
        self._end = end
        return memory[:, :, :end]

    @property
    def end(self) -> int:
        """The end of what layers have written; between forward passes the length."""
        return max(self._length, self._end)

    def advance(self, tokens: int) -> None:  # over positions that are already written
        self._length = self._end = self._length + tokens

    def check_room(self, tokens: int) -> None:
        if self._length + tokens > self.capacity:
            raise ValueError(f"cache of {self.capacity} positions is full")

    def k(self, layer: int) -> Tensor:
        """(B, Hkv, length, width) view of the layer's keys, rotary positions already applied."""
        return self.slabs[layer].keys[:, :, : self._length]

    def v(self, layer: int) -> Tensor:
        """(B, Hkv, length, width) view of the layer's values."""
        return self.slabs[layer].values[:, :, : self._length]

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
        if list(offsets) != list(range(len(offsets))):
            self._note_change(start)
            for block in self._blocks:
                block.move(start, offsets)
        self.length = start + len(offsets)

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
        assert self.recurrence is not None
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
    def __init__(self, owner: SharedCache, layer: int) -> None:
        super().__init__(owner)
        self.layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> Any:
        caches, widths = self.owner.caches, self.owner.widths
        new = (key_states.split(widths, dim=2), value_states.split(widths, dim=2))
        pairs = [c.slabs[self.layer].update(k, v) for c, k, v in zip(caches, *new, strict=True)]
        return tuple(Parts([pair[i] for pair in pairs], widths) for i in range(2))


class SharedCache(Cache):
    """One-row caches of several requests, for one forward pass over their concatenated new tokens,
    `widths` of each: attention is per request, and nothing is padded."""

    length, capacity = 0, -1

    def __init__(self, caches: Sequence[KVCache], widths: list[int]) -> None:
        self.caches, self.widths = list(caches), widths
        slabs = enumerate(caches[0].slabs)
        shared = [_SharedSlab(self, i) if isinstance(s, Slab) else s for i, s in slabs]
        super().__init__(layers=shared)
