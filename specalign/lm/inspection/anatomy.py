"""The structure of a model: what each layer caches for a token, and which attention it runs."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from specalign.folder.config import end_ids
from specalign.lm.masks import Layout, use_layout
from specalign.lm.slabs import LayerShape

if TYPE_CHECKING:
    from transformers.cache_utils import DummyLayer  # 5.17 lacks it

UNLIMITED = 1 << 20
"""The context of a model whose config names none (ALiBi, recurrent states)."""
_CONTEXTS = (
    "max_position_embeddings", "max_target_positions", "max_seq_len", "seq_length", "n_positions", "n_ctx",
)  # fmt: skip
_BY_BLOCKS = "MiniMaxM3VLSparseCacheLayer"
"""Selects keys by blocks of consecutive cache entries."""
_KNOWN_LAYERS = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer", "DynamicIndexedLayer", _BY_BLOCKS,
}  # fmt: skip

CacheLayer: TypeAlias = "CacheLayerMixin | LinearAttentionCacheLayerMixin | DummyLayer"


@dataclass(frozen=True)
class Anatomy:
    """A model's layers, and how its decoder is called.

    shapes: what each layer caches for every token. others: layers that cache something else as
    well, or instead. ours: whether layers attend through our function. groups: query heads per key
    head, 1 where layers differ. recurrent: whether a layer has a state that cannot be shortened by
    a token. by_place: whether a token's position is its cache entry, so drafts cannot branch.
    apart: whether texts packed into one row run one by one, because no mask separates them.
    """

    layers: nn.ModuleList
    config: PreTrainedConfig
    cache_name: str
    takes_positions: bool
    shapes: Sequence[LayerShape | None] = ()
    others: Sequence[int] = ()
    ours: bool = False
    groups: int = 1
    recurrent: bool = False
    by_place: bool = False
    apart: bool = False

    @property
    def attends(self) -> bool:
        return any(shape is not None for shape in self.shapes)

    @property
    def repeats(self) -> bool:
        """Whether layers run, and cache, several times for each token."""
        return len(self.shapes) != len(self.layers)

    @property
    def chains_only(self) -> bool:
        return self.by_place or self.recurrent

    def empty_cache(self) -> Cache:
        """A growing cache of transformers."""
        return DynamicCache(config=self.config)

    def other_layers(self) -> dict[int, CacheLayer]:
        """New cache layers, by number, of `others`."""
        fresh = self.empty_cache().layers if self.others else []
        return {i: fresh[i] for i in self.others}

    def heads(self) -> tuple[int, int]:
        """Key heads and the width of a key, of the first layer that attends."""
        first = next((shape for shape in self.shapes if shape is not None), None)
        return (1, self.config.hidden_size) if first is None else (first.heads, first.key)

    def arguments(
        self, tokens_BL: Tensor, positions_BL: Tensor, cache: Cache | None
    ) -> dict[str, object]:
        """The arguments of the decoder."""
        arguments: dict[str, object] = {"input_ids": tokens_BL, "use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_name] = cache
        else:  # without a mask transformers would look for packed documents in the positions
            arguments["attention_mask"] = torch.ones_like(tokens_BL)
        if self.takes_positions:
            arguments["position_ids"] = positions_BL
        return arguments


@torch.no_grad()
def inspect_model(model: PreTrainedModel, body: PreTrainedModel) -> Anatomy:
    """Run one token through the decoder. Raises NotImplementedError if no layer caches anything, or
    one caches what cannot be rolled back."""
    config = model.config.get_text_config(decoder=True)
    layers = decoder_layers(body, config.num_hidden_layers)
    takes_positions = "position_ids" in inspect.signature(body.forward).parameters
    bare = Anatomy(layers, config, cache_name(body), takes_positions)
    cache = bare.empty_cache()
    kinds = {type(layer).__name__ for layer in cache.layers}
    unknown = kinds - _KNOWN_LAYERS
    if unknown:
        raise NotImplementedError(f"its layers keep a {min(unknown)}, which can't be rolled back")
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    layout = Layout(token, 0, 1, model.dtype)
    with use_layout(layout):
        body(**bare.arguments(token, token, cache))
    shapes = [_shape(layer) for layer in cache.layers]
    states = [isinstance(layer, LinearAttentionLayer) for layer in cache.layers]
    recurrent = any(states)
    if not recurrent and all(shape is None for shape in shapes):
        raise NotImplementedError("it does not use a cache")
    by_blocks = _BY_BLOCKS in kinds
    alibi = config.model_type in ("bloom", "mpt") or bool(getattr(config, "alibi", False))
    # GPT-Neo's local layers select cache entries, not positions
    windows_by_place = "local" in (getattr(config, "attention_layers", None) or ())
    return replace(
        bare,
        shapes=shapes,
        others=[i for i, shape in enumerate(shapes) if shape is None or states[i]],
        ours=bool(layout.groups_seen),
        groups=layout.groups_seen.pop() if len(layout.groups_seen) == 1 else 1,
        recurrent=recurrent,
        by_place=not takes_positions or alibi or by_blocks or windows_by_place,
        apart=recurrent or by_blocks or not (takes_positions or alibi),
    )


def cache_name(module: nn.Module) -> str:
    """The name of a module's cache argument."""
    names = inspect.signature(module.forward).parameters
    return next((n for n in ("cache", "past_key_values", "cache_params") if n in names), "cache")


def find_body(model: PreTrainedModel) -> Any:
    """The part of a causal LM that ends with its last hidden state."""
    body = model.get_decoder()
    if body is model or not isinstance(body, PreTrainedModel):
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        if not inner:
            raise NotImplementedError("its decoder can't be separated from its head")
        body = inner[0]
    if body.get_output_embeddings() is not None:  # a causal LM in a wrapper
        return find_body(body)
    return body


def _shape(layer: CacheLayer) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    of_indexer = (getattr(layer, name, None) for name in ("indexer_keys", "idx_keys"))
    index = next((t.shape[-1] for t in of_indexer if t is not None), 0)
    return LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], index)


def decoder_layers(body: nn.Module, count: int) -> nn.ModuleList:
    """The list of layers, whatever its name; a layer may count several times (LongCat)."""
    children = list(body.children())
    children += [grandchild for child in body.children() for grandchild in child.children()]
    lists = [m for m in children if isinstance(m, nn.ModuleList)]
    found = [m for m in lists if len(m) == count]
    found += [m for m in lists if len(m) > 1 and count % len(m) == 0]
    if not found:
        raise NotImplementedError("its decoder has no list of layers")
    return found[0]


def query_heads(config: PreTrainedConfig) -> int:
    """Query heads of the first layer."""
    layers = getattr(config, "per_layer_config", None)
    return int(getattr(layers[0] if layers else config, "num_attention_heads", 1))


def context_limit(config: PreTrainedConfig) -> int:
    """The longest text, in tokens. Where rotary tables change with the length (longrope) it is the
    longest under the first one: a draft over that length would change the tokens before it."""
    found = [getattr(config, name, None) for name in _CONTEXTS]
    limit = next((int(value) for value in found if value), UNLIMITED)
    given = getattr(config, "rope_parameters", None) or {}
    groups = [given, *(group for group in given.values() if isinstance(group, dict))]
    tables = [group for group in groups if group.get("rope_type") == "longrope"]
    return min([limit, *(t.get("original_max_position_embeddings") or limit for t in tables)])


def eos_ids(
    config: PreTrainedConfig, generation: GenerationConfig | None, tokenizer: Tokenizer
) -> tuple[int, ...]:
    """The tokens that end a text, ascending: those of the generation config, at which `generate`
    stops; where it names none, those of the model's config and tokenizer. Ids beyond the vocabulary
    are left out. Raises UserError if one is not a token id."""
    config = config.get_text_config(decoder=True)
    found = end_ids(getattr(generation, "eos_token_id", None), "generation_config.json")
    if not found:
        found = end_ids(getattr(config, "eos_token_id", None), "config.json")
        found |= end_ids(tokenizer.eos_token_id, "the tokenizer")
    size = getattr(config, "vocab_size", None)
    return tuple(sorted(i for i in found if size is None or i < size))
