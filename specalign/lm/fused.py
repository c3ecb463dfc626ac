"""A target's layers in one call for few rows on a CPU (`specalign.kernels.layers`), where they are
those of Llama, Mistral, Qwen2 or Qwen3 without windows. Every other model runs through its own
modules."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from specalign.kernels.layers import LayerStack, Memory, Rows, Weights
from specalign.kernels.linear import MOST_ROWS, RowsLinear, rows_library
from specalign.kernels.replacing import gives_rows
from specalign.lm.cache import KVCache, SharedCache
from specalign.lm.masks import BatchLayout, Layout

Module = Any
"""A module whose parts have Llama's names."""
_BODIES = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary tables that do not depend on the length of the text."""


class FusedLayers:
    """The decoder of a target, from embeddings to the last hidden state.

    fixed: its rotary tables do not depend on the length of the text.
    """

    def __init__(self, stack: LayerStack, body: Module, fixed: bool) -> None:
        self.stack, self.body, self.fixed = stack, body, fixed
        self._tables_2Sw: Tensor | None = None

    def takes(
        self, tokens_BL: Tensor, layout: Layout | BatchLayout, cache: KVCache | SharedCache
    ) -> bool:
        """Whether it can run a forward pass: few rows of one-row caches, at positions from 0 on."""
        if len(tokens_BL) != 1 or not 0 < tokens_BL.shape[1] <= MOST_ROWS:
            return False
        caches = cache.caches if isinstance(cache, SharedCache) else [cache]
        parts = layout.parts if isinstance(layout, BatchLayout) else [layout]
        return all(c.rows == 1 for c in caches) and all(map(_takes_layout, parts))

    def __call__(
        self,
        tokens_1L: Tensor,
        layout: Layout | BatchLayout,
        positions_1L: Tensor,
        cache: KVCache | SharedCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states (1, L, D), and the outputs of the layers `taps`, (1, L, F, D)."""
        parts = layout.parts if isinstance(layout, BatchLayout) else [layout]
        caches = cache.caches if isinstance(cache, SharedCache) else [cache]
        rows = []
        for its_cache, part in zip(caches, parts, strict=True):
            see = None if part.see_LL is None else part.see_LL.contiguous()
            rows.append(Rows(memory_of(its_cache), part.past, part.positions_BL.shape[1], see))
        # calling the module takes twice as long
        x_LD = torch.embedding(self.body.embed_tokens.weight, tokens_1L[0]).float()
        cos_Lw, sin_Lw = self.rotary(x_LD, positions_1L[0], max(p.span[1] for p in parts) + 1)
        hidden_LD, taps_FLD = self.stack(x_LD, cos_Lw, sin_Lw, rows, taps)
        return hidden_LD[None], None if taps_FLD is None else taps_FLD.transpose(0, 1)[None]

    def rotary(self, x_LD: Tensor, positions_L: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The model's own rotary tables at these positions, all below `end`, (L, width) each."""
        tables_2Sw = self.tables(end)
        if tables_2Sw is None:
            cos, sin = self.body.rotary_emb(x_LD[None], positions_L[None])
            return cos[0], sin[0]
        cos_Lw, sin_Lw = tables_2Sw[:, positions_L]
        return cos_Lw, sin_Lw

    def tables(self, end: int) -> Tensor | None:
        """Cosines and sines of all positions below `end`, and more, (2, S, width), if fixed."""
        if self.fixed and (self._tables_2Sw is None or self._tables_2Sw.shape[1] < end):
            places = torch.arange(max(512, 2 * end))[None]
            numbers = self.body.embed_tokens.weight[:1].float()
            self._tables_2Sw = torch.cat(self.body.rotary_emb(numbers, places))
        return self._tables_2Sw


def _takes_layout(layout: Layout) -> bool:
    plain = layout.mask is None and layout.slots is None and len(layout.positions_BL) == 1
    return plain and layout.span[0] >= 0


def memory_of(cache: KVCache, layers: tuple[int, ...] | None = None) -> Memory:
    """A one-row cache as `specalign.kernels` reads and writes it, all layers or these."""
    if layers not in cache.views:
        slabs = cache.slabs if layers is None else [cache.slabs[i] for i in layers]
        cache.views[layers] = Memory([slab.keys for slab in slabs], [slab.values for slab in slabs])
    return cache.views[layers]


def fuse_layers(model: PreTrainedModel, body: Module, layers: nn.ModuleList) -> FusedLayers | None:
    """The model's layers in one call; None where its modules, its config or its shapes are of
    another kind, or no C library is there. That the numbers agree is what the proof checks."""
    if rows_library() is None or model.dtype != torch.float32 or model.device.type != "cpu":
        return None
    if type(body) not in _BODIES or not gives_rows(body.embed_tokens):
        return None
    if any(
        m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in body.modules()
    ):
        return None
    known = all(_has_known_parts(layer) for layer in layers)
    if not known or not _is_windowless(model, layers):
        return None
    first: Module = layers[0]
    weights = [layer_weights(layer) for layer in layers]
    width = int(first.self_attn.head_dim)
    q_norm = getattr(first.self_attn, "q_norm", None)
    try:
        stack = LayerStack(
            weights,
            heads=weights[0].q[0].shape[0] // width,
            kv_heads=weights[0].k[0].shape[0] // width,
            head_width=width,
            scale=float(first.self_attn.scaling),
            eps=float(first.input_layernorm.variance_epsilon),
            last_norm=body.norm.weight,
            head_eps=float(q_norm.variance_epsilon) if q_norm is not None else 0.0,
        )
    except ValueError:  # of other shapes
        return None
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return FusedLayers(stack, body, rope.get("rope_type", "default") in _FIXED_ROTARY)


def _has_known_parts(layer: Module) -> bool:
    return is_silu(layer.mlp.act_fn) and all(isinstance(x, RowsLinear) for x in _linears(layer))


def _linears(layer: Module) -> list[RowsLinear]:
    attention, mlp = layer.self_attn, layer.mlp
    own = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def layer_weights(layer: Module) -> Weights:
    """The weights of a layer under Llama's names, a target's or a block drafter's."""
    q, k, v, o, gate, up, down = (linear.matrix for linear in _linears(layer))
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    weights: list[Any] = [None if norm is None else norm.weight for norm in norms]
    return Weights(q, k, v, o, gate, up, down, *weights)


def is_silu(module: nn.Module) -> bool:
    """Whether it is the activation that `layers.c` computes."""
    return type(module) in (nn.SiLU, type(ACT2FN["silu"]))


def _is_windowless(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Whether every layer attends to the whole text. A layer that says it has no window has none,
    whatever the config says; Mistral's ask the config."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    attentions: list[Module] = [layer.self_attn for layer in layers]
    windows = {getattr(attention, "sliding_window", 0) for attention in attentions}
    has_window = getattr(config, "sliding_window", None) and windows != {None}
    return set(kinds) == {"full_attention"} and not has_window
