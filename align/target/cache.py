"""A preallocated key/value cache: writing advances a length, rolling back reduces it, nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Slab(CacheLayerMixin):
    """One layer's keys and values, (B, Hkv, capacity, head_dim), written where the owning cache says."""

    keys: Tensor
    values: Tensor

    def __init__(self, owner: KVCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.owner = owner
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the memory is there from the start."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        owner, width = self.owner, key_states.shape[2]
        if owner.slots_B is None:
            end = owner.length + width
            self.keys[:, :, owner.length : end] = key_states
            self.values[:, :, owner.length : end] = value_states
        else:  # every row at a place of its own: one token a row
            rows = torch.arange(key_states.shape[0], device=key_states.device)
            self.keys[rows, :, owner.slots_B] = key_states[:, :, 0]
            self.values[rows, :, owner.slots_B] = value_states[:, :, 0]
            end = owner.slots_end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.owner.length

    def get_max_length(self) -> int:
        return self.owner.capacity


class KVCache(Cache):
    """The target's keys and values, allocated once; the first `length` positions count.

    Args:
        layers: number of layers.
        shape: (B, Hkv, capacity, head_dim) of each layer's keys and of its values.

    `cache.length = n` with n ≤ the current length rolls back. With `slots_B` set (B,), a forward of one
    token a row writes row b at `slots_B[b]` instead (batched writing with rows of different lengths).
    """

    def __init__(
        self, layers: int, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._length = 0
        self.capacity = shape[2]
        self.slots_B: Tensor | None = None
        self.slots_end = 0

        # one block of memory for all layers, so that moving positions is one operation
        self._all = torch.zeros((layers, 2, *shape), dtype=dtype, device=device)
        self.slabs = [Slab(self, pair[0], pair[1]) for pair in self._all]
        super().__init__(layers=list(self.slabs))

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        if not 0 <= value <= self._length:
            raise ValueError(f"cache length can only be rolled back: {value} is not within 0..{self._length}")
        self._length = value

    def advance(self, tokens: int) -> None:
        """Count `tokens` more positions, already written, as part of the cache."""
        self._length += tokens

    def check_room(self, tokens: int) -> None:
        """Raises ValueError when `tokens` more positions would not fit."""
        if self._length + tokens > self.capacity:
            raise ValueError(f"cache of {self.capacity} positions is full: {self._length} + {tokens}")

    def k(self, layer: int) -> Tensor:
        """(B, Hkv, length, head_dim) view of the layer's keys, rotary positions already applied."""
        return self.slabs[layer].keys[:, :, : self._length]

    def v(self, layer: int) -> Tensor:
        """(B, Hkv, length, head_dim) view of the layer's values."""
        return self.slabs[layer].values[:, :, : self._length]

    def select(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, in that order."""
        for slab, pair in zip(self.slabs, self._all, strict=True):  # layer by layer: little memory on top
            pair[:, : len(rows)] = pair[:, rows]
            slab.keys, slab.values = pair[0, : len(rows)], pair[1, : len(rows)]
        self._all = self._all[:, :, : len(rows)]

    def keep(self, start: int, offsets: Sequence[int]) -> None:
        """Of the positions written from `start` on, keep those at the ascending `offsets`, made contiguous; the length becomes
        start + len(offsets). This rolls back to one path of a tree."""
        count = len(offsets)
        if list(offsets) != list(range(count)):
            kept = torch.tensor(offsets, device=self._all.device) + start
            self._all[..., start : start + count, :] = self._all.index_select(-2, kept)
        self.length = start + count

    def fill(self, source: KVCache) -> None:
        """Copy the one-row `source` to the start of every row; the length does not change."""
        for slab, other in zip(self.slabs, source.slabs, strict=True):
            slab.keys[:, :, : source.length] = other.keys[:, :, : source.length]
            slab.values[:, :, : source.length] = other.values[:, :, : source.length]


class Parts(NamedTuple):
    """Keys or values of several requests in one forward, each with its own past, its own width in the forward and its own mask;
    `align.target.attention` separates them."""

    tensors: list[Tensor]
    widths: list[int]
    masks: list[Tensor | None]


class _SharedSlab(CacheLayerMixin):
    """One layer of `SharedCache`."""

    def __init__(self, owner: SharedCache, layer: int) -> None:
        super().__init__()
        self.owner, self.layer = owner, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        owner = self.owner
        split = (key_states.split(owner.widths, dim=2), value_states.split(owner.widths, dim=2))
        pairs = [c.slabs[self.layer].update(k, v) for c, k, v in zip(owner.caches, *split, strict=True)]
        keys, values = ([pair[i] for pair in pairs] for i in range(2))
        return Parts(keys, owner.widths, owner.masks), Parts(values, owner.widths, owner.masks)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class SharedCache(Cache):
    """One-row caches of several requests, for one forward over their concatenated new tokens: weights are multiplied once for all,
    attention is per request, and nothing is padded.

    Args:
        caches: one row each, of any lengths.
        widths: new tokens of each.
        masks: of each, as `attention.block_mask` makes them.
    """

    def __init__(self, caches: Sequence[KVCache], widths: list[int], masks: list[Tensor | None]) -> None:
        self.caches, self.widths, self.masks = list(caches), widths, masks
        super().__init__(layers=[_SharedSlab(self, i) for i in range(len(caches[0].slabs))])
