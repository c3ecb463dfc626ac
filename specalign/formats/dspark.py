"""A drafter's Markov and confidence heads as the tensors of DSpark's format (arXiv 2607.05147)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.common.errors import UserError
from specalign.models.markov import (
    GatedHead,
    LinearHead,
    MarkovHead,
    MixedHead,
    RNNHead,
    VanillaHead,
)

KINDS = {"tanh": "rnn", "linear": "vanilla", "vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}
"""`drafter.markov` → `markov_head_type`, for the kinds that DSpark's format has."""


@dataclass(frozen=True)
class DSparkHead:
    """A Markov head and a confidence head in DSpark's terms.

    kind: `markov_head_type`. rank: r, or r + 1 with a confidence head. tensors: by published name,
    fp32.
    """

    kind: str
    rank: int
    tensors: dict[str, Tensor]


@torch.no_grad()
def dspark_tensors(
    markov: MarkovHead | None,
    embedding_VD: Tensor,
    vocabulary: int,
    confidence: nn.Linear | None = None,
    confidence_input: str = "",
) -> DSparkHead:
    """A drafter's heads as tensors of DSpark's format (arXiv 2607.05147), equal up to rounding.

    vanilla: bias = W2·W1[x]; gated: W2·(σ(W_g·[h; W1[x]]) ⊙ W1[x]); rnn: W2·tanh(W_j·[state; W1[x];
    h]), the last third of W_j's rows (gate, candidate, output), whose state columns are zero here.
    A confidence head's share of e(x) becomes one more column of W1, which W2 does not read.

    Args:
        markov: None = a vanilla head of rank 1 whose bias is zero.
        embedding_VD: `Target.embed` of each token, (V, D). vocabulary: Vd.
        confidence: the linear layer of a `ConfidenceHead`. confidence_input: as in `BlockConfig`.

    Raises:
        UserError: a kind that is none of `KINDS`.
    """
    embedding_VD = embedding_VD.float()
    kind, w1, w2 = _tables(markov, embedding_VD, vocabulary)
    rank, width, tensors = w1.shape[1], embedding_VD.shape[1], dict[str, Tensor]()
    if confidence is not None and confidence_input:
        tensors["confidence_head.proj.weight"] = confidence.weight.float().clone()
        tensors["confidence_head.proj.bias"] = confidence.bias.float().clone()
    elif confidence is not None:
        share = confidence.weight[0].float()
        column = embedding_VD @ share[width:, None]
        w1, w2 = (
            (column, w2) if markov is None else (torch.cat((w1, column), dim=1), F.pad(w2, (0, 1)))
        )
        reads = w1.new_zeros(1, w1.shape[1])
        reads[0, -1] = 1
        tensors["confidence_head.proj.weight"] = torch.cat((share[None, :width], reads), dim=1)
        tensors["confidence_head.proj.bias"] = confidence.bias.float().clone()
    size = w1.shape[1]
    tensors["markov_head.markov_w1.weight"] = w1.contiguous()
    tensors["markov_head.markov_w2.weight"] = w2.contiguous()
    if kind == "gated":  # columns: h, W1[x]
        assert isinstance(markov, GatedHead)
        weight, bias = w1.new_zeros(size, width + size), w1.new_zeros(size)
        weight[:rank, :width] = markov.hidden.weight
        weight[:rank, width : width + rank] = markov.previous.weight
        if markov.hidden.bias is not None:
            bias[:rank] = markov.hidden.bias
        tensors |= {"markov_head.gate_proj.weight": weight, "markov_head.gate_proj.bias": bias}
    if kind == "rnn":  # columns: state, W1[x], h; rows: gate, candidate, output
        assert isinstance(markov, MixedHead | RNNHead)
        weight, bias = w1.new_zeros(3 * size, 2 * size + width), w1.new_zeros(3 * size)
        output = weight[2 * size :]
        if isinstance(markov, MixedHead):
            output[:rank, size : size + rank].fill_diagonal_(1)
        else:
            output[:rank, size : size + rank] = markov.previous.weight
        output[:rank, 2 * size :] = markov.hidden.weight
        if markov.hidden.bias is not None:
            bias[2 * size : 2 * size + rank] = markov.hidden.bias
        tensors |= {"markov_head.joint_proj.weight": weight, "markov_head.joint_proj.bias": bias}
    return DSparkHead(kind, size, tensors)


def _tables(
    markov: MarkovHead | None, embedding_VD: Tensor, vocabulary: int
) -> tuple[str, Tensor, Tensor]:
    """DSpark's kind, W1 (V, r) and W2 (Vd, r) of a head."""
    if markov is None:
        return (
            "vanilla",
            embedding_VD.new_zeros(len(embedding_VD), 1),
            embedding_VD.new_zeros(vocabulary, 1),
        )
    if isinstance(markov, VanillaHead):
        kind = "gated" if isinstance(markov, GatedHead) else "vanilla"
        kind = "rnn" if isinstance(markov, RNNHead) else kind
        return kind, markov.table.weight.detach().float().clone(), markov.basis_Vr().float()
    if isinstance(markov, LinearHead):
        return "vanilla", embedding_VD @ markov.previous.weight.float().T, markov.basis_Vr().float()
    if isinstance(markov, MixedHead) and markov.activation == "tanh":
        w1 = embedding_VD @ markov.previous.weight.float().T
        return "rnn", w1, markov.basis_Vr(folded=True).float()
    raise UserError(
        f"drafter.markov=silu: DSpark's format has no such head, but {', '.join(KINDS)}"
    )
