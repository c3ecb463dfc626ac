"""A block drafter in two calls of C kernels for few rows on a CPU: its layers, and the tree of its
drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specalign.kernels.layers import Convolution, LayerStack, Weights
from specalign.kernels.linear import Matrix, RowsLinear, rows_library
from specalign.kernels.replacing import gives_rows
from specalign.kernels.tree import MarkovWeights, TreeHead
from specalign.lm.fused import is_silu, layer_weights
from specalign.models.block_layers import BlockLayer, TwoTapConvolution
from specalign.models.markov import LinearHead, MixedHead

if TYPE_CHECKING:
    from specalign.models.block import BlockDrafter

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
CONVOLUTIONS = {"attn_conv", "mlp_conv"}


def draft_stack(drafter: BlockDrafter) -> LayerStack | None:
    """The layers of a drafter whose linear layers are `RowsLinear`; None for others, or without the
    library."""
    c = drafter.config
    rotaries_fit = len(c.rotaries) < 2 and all(r.full(c.head_dim) for r in c.rotaries)
    values_fit = c.value_dim in (0, c.head_dim)
    layers_fit = all(_is_plain(layer) for layer in drafter.blocks)
    if not (rotaries_fit and values_fit and layers_fit) or rows_library() is None:
        return None
    state = None
    if c.context == "shared_kv" and isinstance(drafter.fc, RowsLinear):
        state = drafter.hidden_norm.weight, drafter.fc.matrix
    try:
        return LayerStack(
            [_weights(layer) for layer in drafter.blocks],
            heads=c.num_attention_heads,
            kv_heads=c.num_key_value_heads,
            head_width=c.head_dim,
            scale=drafter.blocks[0].self_attn.scale,
            eps=c.rms_norm_eps,
            last_norm=drafter.norm.weight,
            head_eps=c.rms_norm_eps,
            state=state,
            block=c.rows,
        )
    except ValueError:  # other shapes, or 16 bits
        return None


def _is_plain(layer: BlockLayer) -> bool:
    parts = {name for name, _ in layer.named_children()} - CONVOLUTIONS
    return (
        parts == PARTS and isinstance(layer.self_attn.q_proj, RowsLinear) and is_silu(layer.mlp.act)
    )


def _weights(layer: BlockLayer) -> Weights:
    around, between = _convolution(layer.attn_conv), _convolution(layer.mlp_conv)
    return replace(layer_weights(layer), attention_conv=around, mlp_conv=between)


def _convolution(module: TwoTapConvolution | None) -> Convolution | None:
    return None if module is None else Convolution(module.delta.matrix, module.offset)


def tree_head(drafter: BlockDrafter, head: Matrix, basis: Matrix | None) -> TreeHead | None:
    """Head and Markov head of a prepared drafter in fp32; None for other kinds, or without the
    library.

    `basis`: (Vd, r), with the Markov head's last layer multiplied in.
    """
    on_cpu = drafter.target.device.type == "cpu" and drafter.norm.weight.dtype == torch.float32
    if not on_cpu or rows_library() is None:
        return None
    weights = None
    if drafter.markov is not None:
        weights = _markov_weights(drafter, basis)
        if weights is None:
            return None
    try:
        return TreeHead(head, drafter.draft_vocab, weights)
    except ValueError:  # other types
        return None


def _markov_weights(drafter: BlockDrafter, basis: Matrix | None) -> MarkovWeights | None:
    markov, embedding = drafter.markov, drafter.target.model.get_input_embeddings()
    if type(markov) not in (MixedHead, LinearHead) or basis is None or not gives_rows(embedding):
        return None
    previous, hidden = getattr(markov, "previous", None), getattr(markov, "hidden", None)
    if not isinstance(previous, RowsLinear) or not isinstance(hidden, RowsLinear | None):
        return None
    kind = drafter.config.markov_kind
    return MarkovWeights(
        None if hidden is None else hidden.matrix, previous.matrix, basis, embedding.weight, kind
    )
