"""A target's layers in one call for few rows on a CPU (`align.kernels.layers`), where its code says that they are of that kind.

Which architectures these are is not a list of names: the code of a model's decoder, layers, attention, feed-forward and
norms is compared with that of Llama, Mistral, Qwen2 and Qwen3 in the transformers that is installed. What is equal computes
the same. Every other model runs through its own modules.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from align.kernels.gradients import without_gradients
from align.kernels.layers import LayerStack, Memory, Rows, Weights
from align.kernels.linear import MOST_ROWS, RowsLinear, rows_library
from align.kernels.replacing import gives_rows
from align.target.cache import KVCache
from align.target.masks import Layout, Together

_MODULES = {
    "Llama": modeling_llama,
    "Mistral": modeling_mistral,
    "Qwen2": modeling_qwen2,
    "Qwen3": modeling_qwen3,
}
_FIXED_ROTARY = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary tables in which a position's line does not depend on the length of the text."""


class FusedLayers:
    """The decoder of a target, from embeddings to the last hidden state."""

    def __init__(self, stack: LayerStack, body: Any, fixed: bool) -> None:
        self.stack, self.body, self.fixed = stack, body, fixed
        self.parts, self.constants = _parts(body), [_constants(layer) for layer in body.layers]
        self._tables_2Sw: Tensor | None = None

    def takes(self, tokens_BL: Tensor, layout: Layout | Together, cache: Any) -> bool:
        """Whether a forward is one for it: few rows of one-row caches, at positions from 0 on."""
        whole = len(self.body.layers) == len(self.stack.weights)  # nobody has cut the model meanwhile
        if not whole or cache is None or len(tokens_BL) != 1 or not 0 < tokens_BL.shape[1] <= MOST_ROWS:
            return False
        if isinstance(layout, Together):
            return all(c.rows == 1 for c in cache.caches) and all(map(_takes_layout, layout.parts))
        return cache.rows == 1 and _takes_layout(layout)

    def unchanged(self, model: Any) -> bool:
        """Whether the model is still the one that was read: its code, its weights' places in memory, no hooks. Asked for every new
        cache, as it takes longer than a token may."""
        layers = self.body.layers
        return (
            _of_the_kind(model, layers)
            and _parts(self.body) == self.parts
            and [_constants(layer) for layer in layers] == self.constants
        )

    @without_gradients
    def __call__(
        self,
        tokens_1L: Tensor,
        layout: Layout | Together,
        positions_1L: Tensor,
        cache: Any,
        taps: Sequence[int],
    ) -> tuple[Tensor, Tensor | None]:
        """Last hidden states (1, L, D), and the outputs of the layers `taps`, (1, L, F, D)."""
        parts = layout.parts if isinstance(layout, Together) else [layout]
        caches: Sequence[KVCache] = cache.caches if isinstance(layout, Together) else [cache]
        rows = [
            Rows(
                memory_of(c),
                p.past,
                p.positions_BL.shape[1],
                None if p.see_LL is None else p.see_LL.contiguous(),
            )
            for c, p in zip(caches, parts, strict=True)
        ]
        # a module's call takes twice as long
        x_LD = torch.embedding(self.body.embed_tokens.weight, tokens_1L[0]).float()
        cos_Lw, sin_Lw = self.rotary(x_LD, positions_1L[0], max(p.span[1] for p in parts) + 1)
        hidden_LD, taps_FLD = self.stack(x_LD, cos_Lw, sin_Lw, rows, taps)
        return hidden_LD[None], None if taps_FLD is None else taps_FLD.transpose(0, 1)[None]

    def rotary(self, x_LD: Tensor, positions_L: Tensor, end: int) -> tuple[Tensor, Tensor]:
        """The model's own rotary tables at these positions, all below `end`, (L, width) each."""
        if (tables_2Sw := self.tables(end)) is None:
            cos, sin = self.body.rotary_emb(x_LD[None], positions_L[None])
            return cos[0], sin[0]
        cos_Lw, sin_Lw = tables_2Sw[:, positions_L]
        return cos_Lw, sin_Lw

    def tables(self, end: int) -> Tensor | None:
        """The cosines and the sines of all positions below `end`, and of more, (2, S, width); None where a position's depend on the
        length of the text."""
        if self.fixed and (self._tables_2Sw is None or self._tables_2Sw.shape[1] < end):
            places = torch.arange(max(512, 2 * end))[None]
            self._tables_2Sw = torch.cat(
                self.body.rotary_emb(self.body.embed_tokens.weight[:1].float(), places)
            )
        return self._tables_2Sw


def _takes_layout(layout: Layout) -> bool:
    positions, see = layout.positions_BL, layout.see_LL
    plain = layout.mask is None and not layout.slots and len(positions) == 1 and layout.span[0] >= 0
    return plain and (
        see is None or (see.dtype == torch.bool and tuple(see.shape) == (positions.shape[1],) * 2)
    )


def _parts(body: Any) -> list[tuple[Any, ...]] | None:
    """Of every module the code that it runs, where its weights lie in memory, and the modules in it; None where one has hooks. A
    module's own dictionaries are read: `parameters()` and `modules()` take ten times as long."""
    found, left = [], [body]
    while left:
        module = left.pop()
        inner = [part for part in module._modules.values() if part is not None]
        left += inner
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        code = module.__dict__.get("forward") or type(module).forward
        places = [p.data_ptr() for p in module._parameters.values() if p is not None]
        found.append((module.__class__, code, places, [*map(id, inner)]))
    return found


def memory_of(cache: KVCache, layers: tuple[int, ...] | None = None) -> Memory:
    """A one-row cache as `align.kernels` reads and writes it, all layers or these."""
    if (found := cache.views.get(layers)) is None:
        slabs = cache.slabs if layers is None else [cache.slabs[i] for i in layers]
        found = cache.views[layers] = Memory([slab.keys for slab in slabs], [slab.values for slab in slabs])
    memory: Memory = found
    return memory


def fused(model: Any, body: Any, layers: nn.ModuleList) -> FusedLayers | None:
    """The model's layers in one call; None where its code or its shapes are of another kind, or no C library is there."""
    if rows_library() is None or not (_of_the_kind(model, layers) and _of_the_code(body, layers)):
        return None
    config = model.config.get_text_config(decoder=True)
    first: Any = layers[0]
    attention, weights = first.self_attn, [layer_weights(layer) for layer in layers]
    constants = {_constants(layer) for layer in layers}
    if len(constants) > 1 or None in constants:
        return None
    width = int(attention.head_dim)
    try:
        stack = LayerStack(
            weights,
            heads=weights[0].q[0].shape[0] // width,
            kv_heads=weights[0].k[0].shape[0] // width,
            head_width=width,
            scale=float(attention.scaling),
            eps=float(first.input_layernorm.variance_epsilon),
            last_norm=body.norm.weight,
            head_eps=float(attention.q_norm.variance_epsilon) if hasattr(attention, "q_norm") else 0.0,
        )
    except ValueError:  # of other shapes
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    return FusedLayers(stack, body, rope.get("rope_type", "default") in _FIXED_ROTARY)


def _constants(layer: Any) -> tuple[float, ...] | None:
    """The numbers of a layer that are no weights; None where its norms differ in them."""
    whole, of_heads = ([norm.variance_epsilon for norm in norms] for norms in _norms(layer))
    if len({*whole}) > 1 or len({*of_heads}) > 1:
        return None
    return (layer.self_attn.head_dim, layer.self_attn.scaling, *whole, *of_heads)


def _linears(layer: Any) -> list[Any]:
    """q, k, v, output, gate, up, down."""
    attention, mlp = layer.self_attn, layer.mlp
    own = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _norms(layer: Any) -> tuple[list[Any], list[Any]]:
    """Those before attention and feed-forward, and those of queries' and keys' heads, where it has some."""
    attention = layer.self_attn
    of_heads = [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return [layer.input_layernorm, layer.post_attention_layernorm], of_heads


def layer_weights(layer: Any) -> Weights:
    """The weights of a layer under Llama's names, a target's or a block drafter's."""
    q, k, v, o, gate, up, down = (linear.matrix for linear in _linears(layer))
    whole, of_heads = _norms(layer)
    return Weights(q, k, v, o, gate, up, down, *(norm.weight for norm in (*whole, *of_heads)))


def is_silu(module: nn.Module) -> bool:
    """Whether it is the activation that `layers.c` computes."""
    return type(module) in (nn.SiLU, type(ACT2FN["silu"]))


def _of_the_kind(model: Any, layers: nn.ModuleList) -> bool:
    """Whether its config asks for nothing else, and its numbers are of the type and place."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    # a layer that says of itself that it has no window has none, whatever the config says; Mistral's ask the config
    own = all(
        getattr(layer.self_attn, "sliding_window", 0) is None
        for layer in layers
        if hasattr(layer, "self_attn")
    )
    full = set(kinds) == {"full_attention"} and (not getattr(config, "sliding_window", None) or own)
    return full and model.dtype == torch.float32 and model.device.type == "cpu"


def _of_the_code(body: Any, layers: nn.ModuleList) -> bool:
    """Whether the modules are those that `layers.c` computes."""
    if any(module._forward_hooks or module._forward_pre_hooks for module in body.modules()):
        return False
    if not _like(body, "Model") or not _children(body, "embed_tokens layers norm rotary_emb"):
        return False
    if not gives_rows(body.embed_tokens) or not _like(body.norm, "RMSNorm"):
        return False
    return all(map(_layer_of_the_kind, layers))


def _layer_of_the_kind(layer: Any) -> bool:
    if not _like(layer, "DecoderLayer") or not _children(
        layer, "self_attn mlp input_layernorm post_attention_layernorm"
    ):
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = "q_proj k_proj v_proj o_proj"
    if not _like(attention, "Attention") or not _like(mlp, "MLP"):
        return False
    if not _children(attention, linears) and not _children(attention, linears + " q_norm k_norm"):
        return False
    whole, of_heads = _norms(layer)
    return (
        all(_like(norm, "RMSNorm") for norm in (*whole, *of_heads))
        and all(isinstance(linear, RowsLinear) for linear in _linears(layer))
        and is_silu(mlp.act_fn)
    )


def _children(module: nn.Module, names: str) -> bool:
    return {name for name, _ in module.named_children()} == set(names.split())


def _like(module: nn.Module, part: str) -> bool:
    """Whether a module's code is that of this part of one of `_MODULES`."""
    kind: Any = type(module)
    return "forward" not in vars(module) and _code(kind) in _known(part)


@cache
def _known(part: str) -> frozenset[str]:
    found = {_code(getattr(module, name + part)) for name, module in _MODULES.items()}
    return frozenset(found)


@cache
def _code(cls: Any) -> str:
    """What a module's forward does, helpers of its file included, without names of types and documentation."""
    module = sys.modules[cls.__module__]
    helpers = ("apply_rotary_pos_emb", "rotate_half") if cls.__name__.endswith("Attention") else ()
    try:
        parts = [_body(inspect.unwrap(cls.forward))]
        parts += [_body(inspect.unwrap(getattr(module, name))) for name in helpers]
    except (OSError, TypeError, AttributeError, SyntaxError):  # no source: nothing is known of it
        return f"unknown {cls}"
    return "\n".join(parts)


def _body(function: Any) -> str:
    tree: Any = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    statements = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.AnnAssign):
                node.annotation = ast.Constant(None)
    arguments = [a.arg for a in (*tree.args.args, *tree.args.kwonlyargs)]
    return ast.dump(ast.Module([ast.Expr(ast.Constant(str(arguments))), *statements], []))
