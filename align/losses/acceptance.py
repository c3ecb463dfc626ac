"""Estimates, from training text, of what decoding will measure: acceptance per position and τ.

Shapes: … leading dimensions (B, A), K drafted positions. Where `valid` (…, K) is false, drafts are
cut: compare with a decoder only anchors whose block is all valid, or ends with end-of-sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def kept_token(log_q_label: Tensor, p_label: Tensor, acceptance: Tensor, valid: Tensor) -> Tensor:
    """Probability that token verification accepts draft m and all before it, (…, K) → (…, K).

    [Π_{j<m} min(1, q_j(x_j)/p_j(x_j))]·β_m with β_m = Σ_x min(p_m, q_m). Its mean is unbiased over
    text x drawn from the very p of the statistics, because an x_j drawn from p is the accepted
    draft with probability min(1, q/p); also where q depends on the drafts before. Π_{j≤m} β_j along
    one path is NOT.
    """
    # in logarithms: p may underflow where q does not
    ratio = (log_q_label - p_label.clamp_min(1e-37).log()).clamp_max(0.0).exp() * valid
    reach = torch.cat((torch.ones_like(ratio[..., :1]), ratio.cumprod(-1)[..., :-1]), dim=-1)
    return reach * valid * acceptance


def expected_accepted_token(
    log_q_label: Tensor, p_label: Tensor, acceptance: Tensor, valid: Tensor
) -> Tensor:
    """Drafts accepted by token verification, (…, K) → (…): `kept_token` summed; τ is one more."""
    return kept_token(log_q_label, p_label, acceptance, valid).sum(-1)


@torch.no_grad()
def kept_greedy(match: Tensor, greedy_label: Tensor, valid: Tensor) -> Tensor:
    """Whether greedy verification accepts draft m and all before it, (…, K) → (…, K), 0 or 1.
    Exact on text that the target wrote greedily. Elsewhere a lower bound: the run ends after the
    first token that is not argmax p, because p after argmax p is not known.
    """
    hit = (match > 0.5) & valid
    on_path = torch.cat((torch.ones_like(hit[..., :1]), (greedy_label > 0.5)[..., :-1]), dim=-1)
    return (hit & on_path).long().cumprod(-1).float()
