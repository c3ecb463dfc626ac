"""The memory of a cache's layers, as transformers' attention layers write and read it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

if TYPE_CHECKING:
    from specalign.lm.cache import KVCache, SharedCache


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
    is_sliding = False

    def __init__(self, owner: KVCache | SharedCache) -> None:
        super().__init__()
        # weakly: the garbage collector does not know how large a cache in a cycle is
        self._owner = weakref.ref(owner)
        self.is_initialized = True

    @property
    def owner(self) -> Any:
        """The cache of this layer."""
        return self._owner()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """The memory is allocated from the start."""

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

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """(B, L, width) new → (B, S, width) all, for DeepSeek-V3.2."""
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: Tensor) -> Tensor:
        """(B, 1, L, width) new → (B, 1, S, width) all, for MiniMax-M3."""
        return self.owner.write(self.index, idx_k)

    def get_seq_length(self) -> int:
        """Including the tokens of this pass, once they are written (GLM-5)."""
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

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        LinearAttentionLayer.lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        return Slab.get_max_length(self)


class Block:
    """The memory of all layers of one shape, so moving positions is one operation."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        shape: LayerShape,
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def zeros(parts: int, width: int, heads: int = shape.heads) -> Tensor:
            size = (len(slabs), parts, rows, heads, capacity, width)
            return torch.zeros(size, dtype=dtype, device=device)

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

    def use(self, parts: list[Tensor]) -> None:
        """Take this memory, shaped as its own."""
        self.parts = parts
        self._point()

    def select(self, rows: Tensor) -> None:
        for part in self.parts:
            for layer in part:  # one at a time to save memory
                layer[:, : len(rows)] = layer[:, rows]
        self.use([part[:, :, : len(rows)] for part in self.parts])

    def move(self, start: int, offsets: Sequence[int]) -> None:
        kept = torch.tensor(offsets, device=self.parts[0].device) + start
        for part in self.parts:
            part[..., start : start + len(offsets), :] = part.index_select(-2, kept)
