"""A target run otherwise: compiled with torch.compile, layer by layer, and as transformers runs
it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specalign.common.errors import UserError
from specalign.kernels.linear import RowsLinear, fast_linear
from specalign.lm.attention import WIDE
from specalign.lm.cache import KVCache, SharedCache
from specalign.lm.loading import reload
from specalign.lm.model import Target
from specalign.lm.slabs import Slab


def compiled(target: Target) -> Target:
    """The same model, its layers compiled with torch.compile: another way to make plain decoding
    fast.

    All layers share the compiled programs. Compiling takes half a minute for SmolLM2 (for the whole
    model at once it took eight). Batches of requests do not use the programs.

    Raises:
        UserError: torch.compile does not work here (for example without a C++ compiler).
    """
    twin = reload(target, fast=fast_linear(target.dtype, target.device) is RowsLinear)
    twin.unfuse()  # its layers in one call would run instead of the compiled ones
    layer_by_layer = torch.compile(_forward_of_its_class, dynamic=True)
    try:
        for i, layer in enumerate(twin.layers):
            layer.forward = partial(_with_its_part_of_the_cache, layer_by_layer, layer, i)
        # long and short prompts, the calls after either, and single tokens each need a program of
        # their own
        for lengths in ((WIDE + 8, WIDE + 6, 1, 1), (5, 3, 1, 1)):
            cache = twin.new_cache(1, sum(lengths))
            for length in lengths:
                twin.forward(
                    torch.zeros(1, length, dtype=torch.int64, device=twin.device), cache=cache
                )
    except Exception as error:  # a compiler's failures have no common class
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"torch.compile does not work here: {first[:200]}") from None
    return twin


class _OneLayersCache:
    """One layer's part of the cache, used without the layer's number, so that one program fits all
    layers."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self.slab.update(keys, values)


def _with_its_part_of_the_cache(
    run: Callable[..., Any], layer: nn.Module, index: int, *args: Any, **kwargs: Any
) -> Any:
    # requests side by side have other shapes at every step
    if any(isinstance(value, SharedCache) for value in (*args, *kwargs.values())):
        return _forward_of_its_class(layer, *args, **kwargs)

    def part(value: Any) -> Any:
        return _OneLayersCache(value.slabs[index]) if isinstance(value, KVCache) else value

    return run(layer, *map(part, args), **{name: part(value) for name, value in kwargs.items()})


def _forward_of_its_class(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def stock_model(target: Target) -> Any:
    """The target as transformers runs it, with its own attention (SDPA where it has that) and
    linear layers. Its `generate` writes by the model's own p, as is done here: nothing of its
    generation config is applied but the ends of a text."""
    from transformers import GenerationConfig

    model = reload(target, fast=False).model
    # what a config given to `generate` leaves out is taken from the model's
    ends = list(target.eos_ids)
    model.generation_config = GenerationConfig(
        eos_token_id=ends or None, pad_token_id=(ends or [0])[0]
    )
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # gpt-oss, Mamba 2: there is none
        model.set_attn_implementation("eager")
    return model
