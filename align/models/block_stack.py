"""A block drafter in two calls for few rows on a CPU: its layers (`align.kernels.layers`), and the tree of its drafts
(`align.kernels.tree`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from align.kernels.layers import Convolution, LayerStack, Rows, Weights
from align.kernels.linear import MOST_ROWS, Matrix, RowsLinear, rows_library
from align.kernels.replacing import gives_rows
from align.kernels.tree import MarkovWeights, TreeHead
from align.models.block_layers import BlockLayer, TwoTapConvolution
from align.models.markov import LinearHead, MixedHead
from align.target.cache import KVCache
from align.target.fused import is_silu, layer_weights, memory_of

if TYPE_CHECKING:
    from align.models.block import BlockDrafter

PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
CONVOLUTIONS = {"attn_conv", "mlp_conv"}


def draft_stack(drafter: BlockDrafter) -> LayerStack | None:
    """The layers of a drafter whose linear layers are `RowsLinear`; None where they are of another kind, or no library is there."""
    config = drafter.config
    plain = all(
        {name for name, _ in layer.named_children()} - CONVOLUTIONS == PARTS
        and isinstance(layer.self_attn.q_proj, RowsLinear)
        and is_silu(layer.mlp.act)
        for layer in drafter.blocks
    )
    rotary = config.rotaries
    same = config.value_dim in (0, config.head_dim) and len(rotary) < 2
    if not plain or not same or not all(r.full(config.head_dim) for r in rotary) or rows_library() is None:
        return None
    try:
        return LayerStack(
            [_weights(layer) for layer in drafter.blocks],
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=config.head_dim,
            scale=drafter.blocks[0].self_attn.scale,
            eps=config.rms_norm_eps,
            last_norm=drafter.norm.weight,
            head_eps=config.rms_norm_eps,
            state=_state(drafter),
            block=config.rows,
        )
    except ValueError:  # of other shapes, or in 16 bits
        return None


def _weights(layer: BlockLayer) -> Weights:
    around = _convolution(layer.attn_conv), _convolution(layer.mlp_conv)
    return replace(layer_weights(layer), attention_conv=around[0], mlp_conv=around[1])


def _convolution(module: TwoTapConvolution | None) -> Convolution | None:
    return None if module is None else Convolution(module.delta.matrix, module.offset)


def _state(drafter: BlockDrafter) -> tuple[Tensor, Matrix] | None:
    """What turns the target's state before a block into what its rows are given; None for `taps`."""
    if drafter.config.context == "taps" or not isinstance(drafter.fc, RowsLinear):
        return None
    return drafter.hidden_norm.weight, drafter.fc.matrix


def drafted(
    stack: LayerStack,
    x_RD: Tensor,
    cos_Rw: Tensor,
    sin_Rw: Tensor,
    cache: KVCache,
    layers: tuple[int, ...] | None,
    see_RR: Tensor,
    state_D: Tensor | None = None,
) -> Tensor | None:
    """Normalised last hidden states (R, D) of block rows after what these layers of the cache hold, None = all, which stays as it
    is; `see_RR`: which rows each one sees, bool; `state_D`: the target's before the block, where the rows do not hold what it gives
    them. None where the rows are too many or the cache has several."""
    if len(x_RD) > MOST_ROWS or cache.rows != 1:
        return None
    rows = Rows(memory_of(cache, layers), cache.length, len(x_RD), see_RR.contiguous(), apart=True)
    return stack(x_RD, cos_Rw, sin_Rw, [rows], state_D=state_D)[0]


def tree_head(drafter: BlockDrafter, head: Matrix, basis: Matrix | None) -> TreeHead | None:
    """The head and the Markov head of a drafter as they are after `prepare_for_drafting`; None where they are of another kind, its
    hidden states are not in fp32, or no library is there. `basis`: (Vd, r), with the Markov head's last layer multiplied in."""
    markov, embedding = drafter.markov, drafter.target.model.get_input_embeddings()
    if rows_library() is None or drafter.target.device.type != "cpu":
        return None
    if drafter.norm.weight.dtype != torch.float32:
        return None
    weights = None
    if markov is not None:
        kind, hidden, previous = drafter.config.markov_kind, getattr(markov, "hidden", None), None
        if type(markov) in (MixedHead, LinearHead):
            previous = getattr(markov, "previous", None)
        if not gives_rows(embedding) or basis is None or not isinstance(previous, RowsLinear):
            return None
        if kind != "linear" and not isinstance(hidden, RowsLinear):
            return None
        weights = MarkovWeights(
            None if hidden is None else hidden.matrix, previous.matrix, basis, embedding.weight, kind
        )
    try:
        return TreeHead(head, drafter.draft_vocab, weights)
    except ValueError:  # of other types
        return None
