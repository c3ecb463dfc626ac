"""A block drafter in two calls of C kernels for few rows on a CPU: its layers, and its trees."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specalign.kernels.layers import Convolution, LayerStack
from specalign.kernels.linear import Matrix, RowsLinear, rows_library
from specalign.kernels.replacing import gives_rows
from specalign.kernels.tree import DraftHead, MarkovWeights
from specalign.lm.fused import is_silu, layer_weights
from specalign.models.block_layers import TwoTapConvolution

if TYPE_CHECKING:
    from specalign.models.block import BlockDrafter


def draft_stack(drafter: BlockDrafter) -> LayerStack | None:
    """The layers in one C call; None without the library, or for layers that it lacks."""
    c = drafter.config
    fits = c.value_dim in (0, c.head_dim) and all(
        isinstance(layer.self_attn.q_proj, RowsLinear) and is_silu(layer.mlp.act)
        for layer in drafter.blocks
    )
    rotaries_fit = len(c.rotaries) < 2 and all(r.full(c.head_dim) for r in c.rotaries)
    if not (fits and rotaries_fit) or rows_library() is None:
        return None
    state = None
    if c.context == "shared_kv" and isinstance(drafter.fc, RowsLinear):
        state = drafter.hidden_norm.weight, drafter.fc.matrix
    layers = [
        replace(
            layer_weights(layer),
            attention_conv=_convolution(layer.attn_conv),
            mlp_conv=_convolution(layer.mlp_conv),
        )
        for layer in drafter.blocks
    ]
    try:
        return LayerStack(
            layers,
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


def _convolution(module: TwoTapConvolution | None) -> Convolution | None:
    return None if module is None else Convolution(module.delta.matrix, module.offset)


def draft_head(drafter: BlockDrafter, head: Matrix, basis: Matrix | None) -> DraftHead | None:
    """The head, with `basis` (Vd, r) for the bias, in one C call; None where it does not apply."""
    markov, weights = drafter.markov, None
    on_cpu = drafter.target.device.type == "cpu" and drafter.norm.weight.dtype == torch.float32
    if not on_cpu or rows_library() is None:
        return None
    if markov is not None:
        embedding = drafter.target.model.get_input_embeddings()
        if markov.table is not None or basis is None or not gives_rows(embedding):
            return None
        if not isinstance(markov.previous, RowsLinear):
            return None
        hidden = markov.hidden.matrix if isinstance(markov.hidden, RowsLinear) else None
        weights = MarkovWeights(
            hidden, markov.previous.matrix, basis, embedding.weight, markov.kind
        )
    try:
        return DraftHead(head, drafter.draft_vocab, weights)
    except ValueError:  # other types
        return None
