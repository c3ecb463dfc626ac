"""Parameterisations of a diffusion network's output: a masked predictor (SUBS) and SEDD's log-score, each from the other.

V counts the mask, as SEDD's vocabulary does. Everything is elementwise over the leading dimensions: rows (R, V) with
tokens and σ of shape (R,) serve as well as (B, L, V) with (B, L), and σ may be (B, 1). Computed in fp32 (fp64 stays).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def full_precision(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is in fp64: SEDD's sums in bf16 lose 0.02 nats a token."""
    return x if x.dtype == torch.float64 else x.float()


def log_expm1(sigma: Tensor) -> Tensor:
    """log(e^σ − 1), which neither overflows for large σ nor cancels for small ones."""
    sigma = full_precision(sigma)
    return sigma + torch.log(-torch.expm1(-sigma))


def logsumexp_without(x_V: Tensor, column: int) -> Tensor:
    """log Σ_{y≠column} e^{x_y}, (…,), from the two sides of the column: no copy of `x_V` is made."""
    return torch.logaddexp(x_V[..., :column].logsumexp(-1), x_V[..., column + 1 :].logsumexp(-1))


def logsumexp_and_label(x_V: Tensor, label: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """(`logsumexp_without`, x_label), (…,) each; its gradient is one tensor of x's size, where autograd makes three."""
    return _LogSumExpAndLabel.apply(x_V, label, column)


class _LogSumExpAndLabel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_V: Tensor, label: Tensor, column: int) -> tuple[Tensor, Tensor]:
        log_sum = logsumexp_without(x_V, column)
        ctx.save_for_backward(x_V, log_sum, label)
        ctx.column = column
        return log_sum, x_V.gather(-1, label[..., None])[..., 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sum: Tensor, of_label: Tensor) -> tuple[Tensor, None, None]:
        x_V, log_sum, label = ctx.saved_tensors
        slope_V = (x_V - log_sum[..., None]).exp_().mul_(of_log_sum[..., None])
        slope_V[..., ctx.column] = 0.0
        return slope_V.scatter_add_(-1, label[..., None], of_label[..., None]), None, None


def subs_log_probs(logits_V: Tensor, tokens_t: Tensor, mask_id: int) -> Tensor:
    """log p(x_0 | x_t), (…, V): the mask never predicted, a token that is not masked certain of itself.

    MDLM's SUBS (arXiv 2406.07524). SEDD's raw output f can be read so too: the softmax of f without the mask.
    """
    clean = tokens_t != mask_id
    column = torch.tensor([mask_id], device=logits_V.device)
    log_p = full_precision(logits_V).index_fill(-1, column, -math.inf).log_softmax(-1)
    own = torch.zeros_like(log_p[..., 0]).masked_fill(~clean, -math.inf)
    return log_p.masked_fill(clean[..., None], -math.inf).scatter(-1, tokens_t[..., None], own[..., None])


def sedd_log_score(f_V: Tensor, tokens_t: Tensor, sigma: Tensor) -> Tensor:
    """SEDD's log-score "scaled by σ" (absorbing), (…, V): f − log(e^σ−1) − log(V−1), 0 at the input token."""
    shift = log_expm1(sigma) + math.log(f_V.shape[-1] - 1)
    return _pinned(full_precision(f_V) - shift[..., None], tokens_t)


def predictor_log_score(logits_V: Tensor, tokens_t: Tensor, sigma: Tensor, mask_id: int) -> Tensor:
    """A masked predictor as log-score, (…, V): log p_y − log(e^σ−1), p the softmax without the mask; 0 at the input.

    The ratio p_t(y)/p_t(x) of the absorbing graph is conditional probability over e^σ−1: RADD (arXiv 2406.03736, theorem 1).
    """
    logits_V = full_precision(logits_V)
    shift = logsumexp_without(logits_V, mask_id) + log_expm1(sigma)
    return _pinned(logits_V - shift[..., None], tokens_t)


def _pinned(log_score_V: Tensor, tokens_t: Tensor) -> Tensor:
    """Set the log-score of x_t itself to 0, in place: its ratio to itself is 1."""
    return log_score_V.scatter_(-1, tokens_t[..., None], 0.0)


LOG_ZERO = -1e4
"""Stands for log 0 where a label lies outside the draft vocabulary: finite, so that 0·log 0 stays 0."""


def time_weight(sigma: Tensor, rate: Tensor) -> Tensor:
    """dσ/(e^σ − 1), the weight of a masked position's cross-entropy when t is uniform (MDLM, arXiv 2406.07524).

    Under the log-linear schedule it is 1/t for any eps.
    """
    return full_precision(rate) / torch.expm1(full_precision(sigma))
