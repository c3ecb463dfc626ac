"""Losses of discrete diffusion: score entropy and masked cross-entropy, per position, unreduced, in
nats.

Every function is elementwise over the leading dimensions: rows (R, V) with tokens and σ of shape
(R,) serve as well as (B, L, V) with (B, L); σ and its rate broadcast, (B, 1). Rows that do not
count (not `valid`; not masked, for the absorbing graph) are left out before anything of size V is
computed. In fp32 whatever comes in (fp64 stays).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specalign.diffusion.graphs import Absorbing, Graph, excess, on_rows
from specalign.diffusion.parameterization import (
    full_precision,
    logsumexp_and_label,
    time_weight,
)


def score_entropy(
    f_V: Tensor,
    tokens_t: Tensor,
    tokens_0: Tensor,
    sigma: Tensor,
    rate: Tensor,
    graph: Graph,
    valid: Tensor,
    scale_by_sigma: bool = True,
) -> Tensor:
    """dσ·DSE per position, (…,), zero where not `valid`: SEDD's loss (arXiv 2310.16834; SpecDiff,
    eq. 1).

    The log-score is f, for the absorbing graph with `scale_by_sigma` f − log(e^σ−1) − log(V−1).
    """
    if not (isinstance(graph, Absorbing) and scale_by_sigma):
        return full_precision(rate) * on_rows(
            graph.score_entropy, valid, f_V, sigma, tokens_t, tokens_0
        )
    mask_id, masked = graph.mask_id, valid & (tokens_t == graph.mask_id)

    def scaled_excess(f_RV: Tensor, x_0_R: Tensor, weight_R: Tensor) -> Tensor:
        return weight_R * excess(f_RV, x_0_R, mask_id, -math.log(f_RV.shape[-1] - 1))

    return on_rows(scaled_excess, masked, f_V, tokens_0, time_weight(sigma, rate))


def masked_cross_entropy(
    logits_V: Tensor, tokens_t: Tensor, tokens_0: Tensor, mask_id: int, valid: Tensor
) -> Tensor:
    """−log p(x_0 | x_t) per position, (…,), under SUBS: zero where not masked or not `valid`."""

    def cross_entropy(logits_RV: Tensor, x_0_R: Tensor) -> Tensor:
        log_sum, label = logsumexp_and_label(logits_RV, x_0_R, mask_id)
        return log_sum - label

    return on_rows(cross_entropy, valid & (tokens_t == mask_id), logits_V, tokens_0)


def masked_nll(
    logits_V: Tensor,
    tokens_t: Tensor,
    tokens_0: Tensor,
    sigma: Tensor,
    rate: Tensor,
    mask_id: int,
    valid: Tensor,
) -> Tensor:
    """MDLM's NELBO term −log p(x_0 | x_t)·dσ/(e^σ − 1) per position, (…,); zero where not masked or
    not `valid`."""
    cross_entropy = masked_cross_entropy(logits_V, tokens_t, tokens_0, mask_id, valid)
    masked = valid & (tokens_t == mask_id)
    return (
        torch.where(masked, time_weight(sigma, rate), 0.0) * cross_entropy
    )  # σ may be 0 elsewhere
