"""Losses of drafters from `align.losses.divergences`, per drafted position, unreduced: a weighted
sum of terms, each but `streak` times a constant weight of its position in the block. Shapes: …
leading dimensions (B, A), K drafted positions.

Acceptance and τ, as decoding will measure them, are estimated from the same statistics. Where
`valid` is false, drafts are cut: compare with a decoder only anchors whose block is all valid, or
ends with end-of-sequence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from align.losses.divergences import RowStatistics
from specalign.diffusion.noise import LOG_ZERO

_LEAST = 1e-12  # the smallest acceptance to divide by


def d_pace_weights(log_q_label: Tensor, alpha: float, valid: Tensor) -> Tensor:
    """w_k = Σ_{m≥k} Π_{j≤m} ((1−α)·q_j + α), D-PACE (arXiv 2605.18810), up to the first position
    that is not `valid`; α = 0: the streak loss's."""
    smooth = ((1 - alpha) * log_q_label.detach().exp() + alpha) * valid
    return smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


def after_prefix(
    statistics: RowStatistics, valid: Tensor, clean: Tensor
) -> tuple[RowStatistics, Tensor]:
    """Statistics and `valid` (…, K) for the losses of a block that shows its first `clean` (…)
    tokens: shifted left, so that position 1 of every weight and product is the first masked one;
    the end is not valid."""
    steps = torch.arange(valid.shape[-1], device=valid.device) + clean[..., None]
    inside, steps = steps < valid.shape[-1], steps.clamp_max(valid.shape[-1] - 1)
    return statistics.map(lambda value: value.gather(-1, steps)), valid.gather(-1, steps) & inside


def streak(log_q_label: Tensor, valid: Tensor) -> Tensor:
    """−Π_{j≤m} q_j(x_j) at every position m up to the first that is not `valid`: SpecDiff-2's
    streak objective (arXiv 2511.00606, eq. 6), whose gradient is that of −Σ_k w_k·log q_k with
    `d_pace_weights(α=0)`."""
    masked = torch.where(valid, log_q_label, LOG_ZERO)
    return -masked.cumsum(-1).exp() * valid


def likelihood_of_acceptance(acceptance: Tensor, total_variation: Tensor) -> Tensor:
    """−log Σ min(p_k, q_k), the LK loss (arXiv 2602.23881): total variation's gradient over the
    acceptance, so that a position where nothing is accepted yet still learns."""
    beta = acceptance.detach().clamp_min(_LEAST)
    # 1 − total variation loses the digits of a small β: only the gradient is taken from it
    return -beta.log() + (total_variation - total_variation.detach()) / beta


@dataclass(frozen=True)
class Objective:
    """A weighted sum of losses over drafted positions: `objective` of the recipe. `alpha` is used
    by d_pace, `decay` (positions) by exponential and normalised."""

    terms: Mapping[str, float]
    weighting: str = "d_pace"
    decay: float = 4.0
    alpha: float = 0.5

    def weights(self, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """Position weights, (…, K), zero where not valid, no gradient. exponential: w_k =
        exp(−(k−1)/decay), DFlash (arXiv 2602.06036); normalised: divided by their sum over the
        block's valid positions, DSpark (arXiv 2607.05147)."""
        log_q = statistics.log_q_label.detach()
        if self.weighting == "d_pace":
            return d_pace_weights(log_q, self.alpha, valid)
        if self.weighting == "uniform":
            return torch.ones_like(log_q) * valid
        steps = torch.arange(log_q.shape[-1], device=log_q.device, dtype=torch.float32)
        weights = torch.exp(-steps / self.decay) * valid
        if self.weighting == "exponential":
            return weights
        return weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)

    def term(self, name: str, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """One loss at every position, (…, K), without weights, zero where not valid.
        cross_entropy: 0 for a label that the drafter cannot propose. confidence: binary
        cross-entropy to the acceptance β_k, a constant (DSpark)."""
        s = statistics
        if name == "streak":
            return streak(s.log_q_label, valid)
        if name == "cross_entropy":
            return torch.where(valid & (s.log_q_label > LOG_ZERO), -s.log_q_label, 0.0)
        value: Tensor | None = getattr(s, "total_variation" if name == "lk" else name)
        assert value is not None, f"{name} is not among the statistics"
        if name == "confidence":
            beta = s.acceptance.clamp(0, 1)
            value = F.binary_cross_entropy_with_logits(value, beta, reduction="none")
        if name == "lk":
            value = likelihood_of_acceptance(s.acceptance, value)
        return torch.where(valid, value, 0.0)

    def per_position(self, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """The weighted sum of all terms at every position, (…, K), zero where not valid."""
        weights = self.weights(statistics, valid)
        total = torch.zeros_like(statistics.log_q_label)
        for name, weight in self.terms.items():
            value = self.term(name, statistics, valid)
            total = total + weight * (value if name == "streak" else weights * value)
        return total


# ---- acceptance, estimated from training text ----


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
