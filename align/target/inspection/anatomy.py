"""What has to be known of a model to run it through a cache of our own, asked of the model itself.

One token goes through it once: which layers write keys and values and of which shapes, which keep another state, and
whether they attend through our function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionLayer

from align.folder.ends import end_ids
from align.target.cache import KVCache
from align.target.inspection.own_cache import cache_kinds
from align.target.masks import Layout, laid
from align.target.slabs import LayerShape

UNLIMITED = 1 << 20
"""The context of a model whose config names none (ALiBi, recurrent states)."""
_CONTEXTS = (
    "max_position_embeddings",
    "max_target_positions",
    "max_seq_len",
    "seq_length",
    "n_positions",
    "n_ctx",
)


@dataclass(frozen=True)
class Anatomy:
    """A model's layers, and how its decoder is called.

    shapes: of what each layer keeps of every token. others: the layers that keep more, or nothing of their own. ours: whether
    its layers attend through our function. groups: query heads a key head there, 1 where layers differ. recurrent: whether some layer keeps a state that no length can roll back.
    by_place: whether the place of a token in memory is its position, so that drafts may not branch. by_blocks: whether keys are chosen by
    blocks of such places.
    """

    layers: nn.ModuleList
    empty_cache: Callable[[], Cache]
    cache_class: type[KVCache]
    cache_name: str
    takes_positions: bool
    shapes: Sequence[LayerShape | None] = ()
    others: Sequence[int] = ()
    ours: bool = False
    groups: int = 1
    recurrent: bool = False
    by_place: bool = False
    by_blocks: bool = False

    @property
    def attends(self) -> bool:
        return any(shape is not None for shape in self.shapes)

    @property
    def repeats(self) -> bool:
        """Whether layers run several times for a token, and keep something each time: what is kept has other numbers than the layers."""
        return len(self.shapes) != len(self.layers)

    @property
    def chains_only(self) -> bool:
        return self.by_place or self.recurrent

    def other_layers(self) -> dict[int, Any]:
        """Fresh cache layers, by number, of `others`."""
        if not self.others:
            return {}
        fresh = self.empty_cache().layers
        return {i: fresh[i] for i in self.others}

    def heads(self, config: Any) -> tuple[int, int]:
        """Key heads and the width of a key, of the first layer that attends."""
        first = next((shape for shape in self.shapes if shape is not None), None)
        return (1, config.hidden_size) if first is None else (first.heads, first.key)

    def arguments(self, tokens_BL: Tensor, positions_BL: Tensor, cache: Any) -> dict[str, Any]:
        """What the decoder is called with."""
        arguments: dict[str, Any] = {"input_ids": tokens_BL, "use_cache": cache is not None}
        if cache is not None:
            arguments[self.cache_name] = cache
        else:  # without a mask transformers would look for packed documents in the positions
            arguments["attention_mask"] = torch.ones_like(tokens_BL)
        if self.takes_positions:
            arguments["position_ids"] = positions_BL
        return arguments


@torch.no_grad()
def examine(model: Any, body: Any) -> Anatomy:
    """Run one token through the decoder.

    Raises:
        NotImplementedError: a layer keeps what can be neither shortened nor copied, or attends by what else is in the call; or no
            layer keeps anything.
    """
    config = model.config.get_text_config(decoder=True)
    _check_selection(config)
    name, layers = cache_name(body), decoder_layers(body, config.num_hidden_layers)
    kinds = cache_kinds(body, name, model.device)

    def empty_cache() -> Cache:
        cache: Cache = kinds.empty(config=config)
        return cache

    takes_positions = "position_ids" in inspect.signature(body.forward).parameters
    bare = Anatomy(layers, empty_cache, kinds.preallocated, name, takes_positions)
    cache, token = empty_cache(), torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    for layer in cache.layers:
        if type(layer).__name__ not in _KNOWN_LAYERS:
            raise NotImplementedError(f"its layers keep a {type(layer).__name__}, which can't be rolled back")
    layout = Layout(token, 0, 1, model.dtype)
    with laid(layout):
        output = body(**bare.arguments(token, token, cache))
    shapes = [_shape(layer) for layer in cache.layers]
    states = [isinstance(layer, LinearAttentionLayer) for layer in cache.layers]
    if not any(states) and all(shape is None for shape in shapes):
        raise NotImplementedError(f"it keeps nothing in a cache{_where_else(output)}")
    by_blocks = any(type(layer).__name__ in _BY_BLOCKS for layer in cache.layers)
    return replace(
        bare,
        shapes=shapes,
        others=[i for i, shape in enumerate(shapes) if shape is None or states[i]],
        ours=bool(layout.groups_seen),
        groups=layout.groups_seen.pop() if len(layout.groups_seen) == 1 else 1,
        recurrent=any(states),
        by_place=not takes_positions
        or bool(getattr(config, "alibi", False))
        or _local_by_place(config)
        or by_blocks,
        by_blocks=by_blocks,
    )


def cache_name(module: Any) -> str:
    """Under which name it takes a cache."""
    names = inspect.signature(module.forward).parameters
    return next((n for n in ("cache", "past_key_values", "cache_params") if n in names), "cache")


def _where_else(output: Any) -> str:
    """Where a model without a cache has its past, if it says so."""
    others = [name for name, value in output.items() if value is not None and not isinstance(value, Tensor)]
    return f": its past is in {others[0]!r}, which can't be rolled back" if others else ""


def _check_selection(config: Any) -> None:
    """Doge chooses that many keys once a call has more; its choice in a call of several tokens is another than one by one."""
    kept = getattr(config, "keep_window_size", None)
    if isinstance(kept, int) and kept < context_limit(config):
        raise NotImplementedError(
            f"beyond keep_window_size={kept} tokens its attention depends on how many tokens a call has"
        )


_KNOWN_LAYERS = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer", "DummyLayer", "DynamicIndexedLayer", "MiniMaxM3VLSparseCacheLayer",
}  # fmt: skip
_BY_BLOCKS = {"MiniMaxM3VLSparseCacheLayer"}
"""Those that choose keys by blocks of places in memory."""


def decoder(model: Any) -> Any:
    """The part of a causal LM that ends with its last hidden state."""
    body = model.get_decoder()
    if body is model or not isinstance(body, PreTrainedModel):  # ModernBERT calls its head so
        inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
        if not inner:
            raise NotImplementedError("it has no decoder apart from its head")
        body = inner[0]
    has_head = isinstance(body, PreTrainedModel) and body.get_output_embeddings() is not None
    return decoder(body) if has_head else body  # a causal LM within a wrapper


def _shape(layer: Any) -> LayerShape | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    kept = (getattr(layer, name, None) for name in ("indexer_keys", "idx_keys"))
    index = next((t.shape[-1] for t in kept if t is not None), 0)
    return LayerShape(keys.shape[1], keys.shape[-1], values.shape[-1], index)


def decoder_layers(body: nn.Module, count: int) -> nn.ModuleList:
    """The list of layers, whatever its name and wherever it lies (BERT's is its encoder's); a layer may count several times (LongCat's
    attends twice)."""
    lists = [m for m in body.children() if isinstance(m, nn.ModuleList)]
    lists += [m for child in body.children() for m in child.children() if isinstance(m, nn.ModuleList)]
    found = [m for m in lists if len(m) == count] or [m for m in lists if len(m) > 1 and count % len(m) == 0]
    if not found:
        raise NotImplementedError("its decoder has no list of layers")
    return found[0]


def _local_by_place(config: Any) -> bool:
    """GPT-Neo's local layers window by place in memory, with a table of their own."""
    return any("local" in str(kind) for kind in getattr(config, "attention_layers", None) or ())


def query_heads(config: Any) -> int:
    """Of its first layer, where layers differ (dots3)."""
    layers = getattr(config, "per_layer_config", None)
    return int(getattr(layers[0] if layers else config, "num_attention_heads", 1))


def context_limit(config: Any) -> int:
    """The longest text, in tokens."""
    found = [getattr(config, name, None) for name in _CONTEXTS]
    return next((int(value) for value in found if value), UNLIMITED)


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a text, in order: the generation config's, where transformers' `generate` stops. Where that names none `generate`
    never does; then the model's and the tokenizer's. One beyond the vocabulary is never written, and left out.

    Raises:
        UserError: the config names what is no token's id.
    """
    config = model.config.get_text_config(decoder=True)
    found = end_ids(getattr(model.generation_config, "eos_token_id", None), "generation_config.json")
    if not found:
        found = end_ids(getattr(config, "eos_token_id", None), "config.json")
        found |= end_ids(tokenizer.eos_token_id, "the tokenizer")
    size = getattr(config, "vocab_size", None)
    return tuple(sorted(i for i in found if size is None or i < size))
