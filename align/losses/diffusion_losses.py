"""Losses of masked diffusion, per masked position, unreduced, in nats, without `Schedule.weight`.

Rows (R, V) of network outputs at masked positions with their clean tokens (R,). V counts the mask.
In fp32 (fp64 stays): SEDD's sums in bf16 lose 0.02 nats a token.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def score_entropy(f_RV: Tensor, x_0_R: Tensor, mask_id: int) -> Tensor:
    """SEDD's denoising score entropy (arXiv 2310.16834) times e^σ − 1, (R,), for the log-score
    f − log(e^σ − 1) − log(V − 1).

    Z − 1 − s at x_0 with s = f − log(V − 1) and Z = Σ_{y≠mask} e^(s_y); σ has dropped out. It is
    −log softmax(f)[x_0] + (Z − 1 − log Z): the cross-entropy, and 0 or more for a wrong sum.
    """
    log_sum, label = _LogSumExpAndLabel.apply(_widen(f_RV), x_0_R, mask_id)
    shift = -math.log(f_RV.shape[-1] - 1)
    return torch.expm1(log_sum + shift) - (label + shift)


def masked_cross_entropy(logits_RV: Tensor, x_0_R: Tensor, mask_id: int) -> Tensor:
    """−log p(x_0 | x_t), (R,), p a softmax without the mask (MDLM's SUBS, arXiv 2406.07524)."""
    log_sum, label = _LogSumExpAndLabel.apply(_widen(logits_RV), x_0_R, mask_id)
    return log_sum - label


def _widen(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _LogSumExpAndLabel(torch.autograd.Function):
    """(log Σ_{y≠column} e^{x_y}, x_label), without copies of x in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x_RV: Tensor, label_R: Tensor, column: int) -> tuple[Tensor, Tensor]:
        before, after = x_RV[:, :column], x_RV[:, column + 1 :]
        log_sum = torch.logaddexp(before.logsumexp(-1), after.logsumexp(-1))
        ctx.save_for_backward(x_RV, log_sum, label_R)
        ctx.column = column
        return log_sum, x_RV.gather(-1, label_R[:, None])[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_sum: Tensor, of_label: Tensor) -> tuple[Tensor, None, None]:
        x_RV, log_sum, label_R = ctx.saved_tensors
        slope_RV = (x_RV - log_sum[:, None]).exp_().mul_(of_log_sum[:, None])
        slope_RV[:, ctx.column] = 0.0
        return slope_RV.scatter_add_(-1, label_R[:, None], of_label[:, None]), None, None
