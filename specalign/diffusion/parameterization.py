"""What the losses of a masked predictor (SUBS, MDLM) and of SEDD's log-score share.

V counts the mask, as SEDD's vocabulary does. Everything is elementwise over the leading dimensions:
rows (R, V) with tokens and σ of shape (R,) serve as well as (B, L, V) with (B, L), and σ may be (B,
1). Computed in fp32 (fp64 stays).
"""

from __future__ import annotations

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
    """log Σ_{y≠column} e^{x_y}, (…,), from the two sides of the column: no copy of `x_V` is
    made."""
    return torch.logaddexp(x_V[..., :column].logsumexp(-1), x_V[..., column + 1 :].logsumexp(-1))


def logsumexp_and_label(x_V: Tensor, label: Tensor, column: int) -> tuple[Tensor, Tensor]:
    """(`logsumexp_without`, x_label), (…,) each, with one tensor of x's size as gradient, not
    three."""
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


LOG_ZERO = -1e4
"""Stands for log 0 where a label lies outside the draft vocabulary: finite, so that 0·log 0 stays
0."""


def time_weight(sigma: Tensor, rate: Tensor) -> Tensor:
    """dσ/(e^σ − 1): weight of a masked position's cross-entropy, t uniform (MDLM, arXiv
    2406.07524).

    Under the log-linear schedule it is 1/t for any eps.
    """
    return full_precision(rate) / torch.expm1(full_precision(sigma))
