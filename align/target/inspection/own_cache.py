"""Models that keep their past in a cache class of their own, and ours in its place.

`generate` gives such a model no cache, and it makes one. What it asks of that one is offered here over layers of transformers' own
kinds, so that its states are rolled back like those of any other.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from align.target.cache import KVCache


@dataclass(frozen=True)
class CacheKinds:
    """empty: makes transformers' cache that grows, of a config. preallocated: ours."""

    empty: Any = DynamicCache
    preallocated: type[KVCache] = KVCache


class _LinearStates:
    """What MiniMax asks for: one state of each linear layer, beside the keys and values of the others."""

    layers: list[Any]
    linear_cache: tuple[Any, ...] = ()

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        state: Tensor | None = self.layers[layer_idx].recurrent_states[0]
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.layers[layer_idx].recurrent_states[0] = linear_cache


class _Rows:
    """xLSTM's `rnn_state`: the states of a layer, zero at first, which it writes in place."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def __getitem__(self, layer: int) -> tuple[Tensor, ...]:
        states = self.cache.layers[layer].recurrent_states
        for i, like in enumerate(self.cache.like):
            if states[i] is None:
                states[i] = like.new_zeros(getattr(self.cache, "rows", 1), *like.shape[1:])
        return tuple(states.values())


class _LayerStates:
    """What xLSTM asks for: several states of each layer, and nothing else."""

    seqlen_offset = 0
    like: tuple[Tensor, ...] = ()

    @property
    def rnn_state(self) -> _Rows:
        return _Rows(self)


@torch.no_grad()
def cache_of_its_own(body: Any, cache_name: str, device: torch.device) -> Any:
    """The cache that a decoder makes for one token where it is given none, if that is of a class of its own; else None. Only one whose
    source has such a class is asked."""
    source = type(body).__module__
    classes = [c for c in vars(sys.modules[source]).values() if inspect.isclass(c) and c.__module__ == source]
    if not any(c.__name__.endswith("Cache") and not issubclass(c, CacheLayerMixin) for c in classes):
        return None
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    kept = body(input_ids=token, use_cache=True).get(cache_name)
    return kept if type(kept).__module__ == source else None


def cache_kinds(body: Any, cache_name: str, device: torch.device) -> CacheKinds:
    """The kinds of cache that a decoder takes.

    Raises:
        NotImplementedError: it makes one of its own that is not known here.
    """
    if (kept := cache_of_its_own(body, cache_name, device)) is None:
        return CacheKinds()
    kind = type(kept)
    if hasattr(kind, "set_linear_cache") and issubclass(kind, DynamicCache):

        class Empty(_LinearStates, kind):  # type: ignore[misc, valid-type]
            def __init__(self, config: Any) -> None:
                DynamicCache.__init__(self, config=config)

        return CacheKinds(Empty, type("Preallocated", (_LinearStates, KVCache, kind), {}))
    if isinstance(states := getattr(kept, "rnn_state", None), dict):
        like = tuple(states[0])

        def empty(config: Any) -> Cache:
            layers: list[Any] = [LinearAttentionLayer(number_of_states=len(like)) for _ in states]
            return type("Empty", (_LayerStates, Cache), {"like": like})(layers=layers)

        return CacheKinds(empty, type("Preallocated", (_LayerStates, KVCache), {"like": like}))
    raise NotImplementedError(
        f"it keeps its past in a {kind.__name__} of its own, which can't be rolled back"
    )
