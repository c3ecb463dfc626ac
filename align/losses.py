"""Calibration losses: how far the drafter's distribution q is from the target's p, per drafted position, unreduced.

All sums run in fp32 whatever the inputs are, in chunks of rows, so that memory is (chunk × V) and never (rows × V):
each chunk is recomputed in the backward pass. p is constant; gradients reach the drafter's hidden states and the
factors of its Markov bias. Shapes: B rows of text, A anchors, K drafted positions, R = B·A·K rows of the head.

With a pruned draft vocabulary q is 0 outside it while p is not; what that means for each loss is said at `RowStatistics`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from align.errors import UserError, nearest

LOG_ZERO = -1e4
"""Stands for log 0 where a label lies outside the draft vocabulary: finite, so that 0·log 0 stays 0."""


@dataclass
class RowStatistics:
    """What the losses need of every drafted position; each field has shape (B, A, K), fp32 (None = not asked for).

    log_q_label: log q_k(x_k) of the token in the text; LOG_ZERO and no gradient outside the draft vocabulary.
    forward_kl: Σ p log(p/q) over the draft vocabulary. What p has outside it adds +∞ without a gradient: left out.
    reverse_kl: Σ q log(q/p).
    jensen_shannon: ½ KL(p‖m) + ½ KL(q‖m), m = ½(p+q); p's mass outside the draft vocabulary adds ½·mass·log 2.
    total_variation: 1 − Σ min(p, q), exact over the whole vocabulary.
    acceptance: β = Σ min(p, q), the chance that token verification accepts a draw from q. No gradient.
    p_label: p_k(x_k). match: argmax q = argmax p over the whole vocabulary. greedy_label: x_k = argmax p. No gradient.
    """

    log_q_label: Tensor
    acceptance: Tensor
    p_label: Tensor
    match: Tensor
    greedy_label: Tensor
    forward_kl: Tensor | None = None
    reverse_kl: Tensor | None = None
    jensen_shannon: Tensor | None = None
    total_variation: Tensor | None = None


DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
_ALWAYS = ("log_q_label", "acceptance", "p_label", "match", "greedy_label")


@dataclass
class TargetPlaces:
    """p at every text position P, where the row of p is over the token that follows: one pass of the head for all anchors.

    hidden_PD: the target's last hidden states; log_z_P: log-sum-exp over the WHOLE vocabulary; best_P: argmax p;
    next_P: the token that follows in the text; log_p_next_P: its log-probability.
    """

    hidden_PD: Tensor
    log_z_P: Tensor
    best_P: Tensor
    next_P: Tensor
    log_p_next_P: Tensor


@torch.no_grad()
def target_places(
    hidden_PD: Tensor,
    next_P: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 256,
) -> TargetPlaces:
    """Run the target's head, (chunk, D) → (chunk, V) logits at a time."""
    log_z, best, log_p = [], [], []
    for part, following in zip(hidden_PD.split(chunk), next_P.split(chunk), strict=True):
        logits = head(part).float()
        best.append(logits.argmax(-1))
        if temperature != 1.0:
            logits = logits / temperature
        log_z.append(logits.logsumexp(-1))
        log_p.append(logits.gather(-1, following[:, None])[:, 0] - log_z[-1])
    return TargetPlaces(hidden_PD, torch.cat(log_z), torch.cat(best), next_P, torch.cat(log_p))


@dataclass
class DraftRows:
    """The drafter's R rows: hidden_RD, the text position whose p each row imitates (its label is the token that
    follows there), and the Markov factor z_Rr with basis_rV, or None."""

    hidden_RD: Tensor
    place_R: Tensor
    z_Rr: Tensor | None = None
    basis_rV: Tensor | None = None


def row_statistics(
    rows: DraftRows,
    places: TargetPlaces,
    head_VdD: Tensor,
    draft_vocab: Tensor | None,
    shape: tuple[int, ...],
    wanted: frozenset[str] = frozenset(),
    temperature: float = 1.0,
    chunk_rows: int = 1024,
) -> RowStatistics:
    """Statistics of R rows, in chunks of `chunk_rows`, reshaped to `shape`.

    Args:
        head_VdD: rows of the frozen head for the draft vocabulary, (Vd, D).
        draft_vocab: (Vd,) ascending target ids of those rows; None = all of V in order.
        wanted: divergences to compute, names of `DIVERGENCES`.
        temperature: p is softmax(logits / temperature); q is the drafter's own softmax. Must be the one that `places`
            was made with.

    Raises:
        UserError: an unknown divergence.
    """
    for name in wanted - set(DIVERGENCES):
        raise UserError(f"objective: unknown divergence {name!r}{nearest(name, DIVERGENCES)}")
    names = tuple(n for n in DIVERGENCES if n in wanted)
    needs_grad = torch.is_grad_enabled() and (
        rows.hidden_RD.requires_grad or _requires(rows.z_Rr) or _requires(rows.basis_rV)
    )
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, rows.hidden_RD.shape[0], chunk_rows):
        cut = slice(start, start + chunk_rows)
        z = None if rows.z_Rr is None else rows.z_Rr[cut]
        args = (rows.hidden_RD[cut], z, rows.basis_rV, rows.place_R[cut])
        if needs_grad and rows.hidden_RD.shape[0] > chunk_rows:  # a single chunk is within the bound as it is
            part = checkpoint(
                _chunk, *args, places, head_VdD, draft_vocab, names, temperature, use_reentrant=False
            )
        else:
            part = _chunk(*args, places, head_VdD, draft_vocab, names, temperature)
        parts.append(part)
    columns = [torch.cat(column).view(shape) for column in zip(*parts, strict=True)]
    return RowStatistics(**dict(zip(_ALWAYS + names, columns, strict=True)))


def _requires(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _chunk(
    hidden_RD: Tensor,
    z_Rr: Tensor | None,
    basis_rV: Tensor | None,
    place_R: Tensor,
    places: TargetPlaces,
    head_VdD: Tensor,
    draft_vocab: Tensor | None,
    names: tuple[str, ...],
    temperature: float,
) -> tuple[Tensor, ...]:
    # contiguous operands: a strided bf16 product onto a wide head is hundreds of times slower
    logits = F.linear(hidden_RD.contiguous(), head_VdD.to(hidden_RD.dtype)).float()
    if z_Rr is not None and basis_rV is not None:
        logits = logits + (z_Rr @ basis_rV.to(z_Rr.dtype)).float()
    log_q = F.log_softmax(logits, dim=-1)
    with torch.no_grad():
        own, where = torch.unique(place_R, return_inverse=True)
        raw = F.linear(places.hidden_PD[own].contiguous(), head_VdD.to(places.hidden_PD.dtype)).float()
        log_p = (raw / temperature - places.log_z_P[own][:, None])[where]
        p = log_p.exp()
    label_R = places.next_P[place_R]
    column_R, inside_R = _columns(label_R, draft_vocab)
    log_q_label = torch.where(inside_R, log_q.gather(-1, column_R[:, None])[:, 0], LOG_ZERO)
    with torch.no_grad():
        p_label = places.log_p_next_P[place_R].exp()
        both = torch.minimum(p, log_q.exp()).sum(-1)
        top = log_q.argmax(-1)
        best_P = places.best_P[place_R]
        match = ((top if draft_vocab is None else draft_vocab[top]) == best_P).float()
    divergences = [_DIVERGENCE[n](p, log_p, log_q) for n in names]
    return (log_q_label, both, p_label, match, (label_R == best_P).float(), *divergences)


def _columns(label_R: Tensor, draft_vocab: Tensor | None) -> tuple[Tensor, Tensor]:
    """Column of each label in the draft vocabulary, and whether it has one."""
    if draft_vocab is None:
        return label_R, torch.ones_like(label_R, dtype=torch.bool)
    column = torch.searchsorted(draft_vocab, label_R).clamp_max(len(draft_vocab) - 1)
    return column, draft_vocab[column] == label_R


def _forward_kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (p * (log_p.clamp_min(LOG_ZERO) - log_q)).sum(-1)


def _reverse_kl(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_q.exp() * (log_q - log_p.clamp_min(LOG_ZERO))).sum(-1)


def _jensen_shannon(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = torch.logaddexp(log_p.clamp_min(LOG_ZERO), log_q) - log(2)
    inside = p * (log_p.clamp_min(LOG_ZERO) - log_m) + log_q.exp() * (log_q - log_m)
    return 0.5 * (inside.sum(-1) + (1 - p.sum(-1)).clamp_min(0) * log(2))


def _total_variation(p: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    return 1 - torch.minimum(p, log_q.exp()).sum(-1)


_DIVERGENCE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jensen_shannon": _jensen_shannon,
    "total_variation": _total_variation,
}


# ---- weights over the K positions of a block: constants, no gradient ----


def exponential_weights(log_q_label: Tensor, decay: float) -> Tensor:
    """w_k = exp(−(k−1)/decay), DFlash's decayed cross-entropy (arXiv 2602.06036)."""
    steps = torch.arange(log_q_label.shape[-1], device=log_q_label.device, dtype=torch.float32)
    return torch.exp(-steps / decay).expand_as(log_q_label)


def d_pace_weights(log_q_label: Tensor, alpha: float, valid: Tensor | None = None) -> Tensor:
    """w_k = Σ_{m≥k} Π_{j≤m} ((1−α)·q_j + α), D-PACE (arXiv 2605.18810); α = 0 are the streak loss's own weights.

    Positions that are not `valid` end the sum.
    """
    smooth = (1 - alpha) * log_q_label.detach().exp() + alpha
    if valid is not None:
        smooth = smooth * valid
    return smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)


def streak(log_q_label: Tensor, valid: Tensor) -> Tensor:
    """−Π_{j≤m} q_j(x_j) at every position m: SpecDiff-2's streak objective (arXiv 2511.00606, eq. 6), as a loss.

    Its gradient is that of −Σ_k w_k·log q_k with `d_pace_weights(α=0)`.
    """
    masked = torch.where(valid, log_q_label, LOG_ZERO)
    return -masked.cumsum(-1).exp() * valid


LOSSES = ("cross_entropy", *DIVERGENCES, "streak")
WEIGHTINGS = ("d_pace", "exponential", "uniform")


class Objective:
    """A weighted sum of losses over drafted positions.

    Every term but `streak`, which has its own, is multiplied by the position weights.

    Args:
        terms: weight by name, names of `LOSSES`.
        weighting: d_pace, exponential or uniform; `alpha` belongs to the first, `decay` to the second.

    Raises:
        UserError: an unknown name, no term, or a weight that is not positive.
    """

    def __init__(
        self, terms: Mapping[str, float], weighting: str = "d_pace", decay: float = 4.0, alpha: float = 0.5
    ) -> None:
        for name, weight in terms.items():
            if name not in LOSSES:
                raise UserError(f"objective.terms: unknown loss {name!r}{nearest(name, LOSSES)}")
            if not weight > 0:
                raise UserError(f"objective.terms.{name}={weight}: a weight must be positive")
        if not terms:
            raise UserError(f"objective.terms is empty{nearest('', LOSSES)}")
        if weighting not in WEIGHTINGS:
            raise UserError(f"objective.weighting={weighting!r} is unknown{nearest(weighting, WEIGHTINGS)}")
        self.terms, self.weighting, self.decay, self.alpha = dict(terms), weighting, decay, alpha

    @property
    def wanted(self) -> frozenset[str]:
        """The divergences that `row_statistics` has to compute."""
        return frozenset(self.terms) & frozenset(DIVERGENCES)

    def weights(self, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """Position weights, (…, K), zero where not valid."""
        if self.weighting == "d_pace":
            return d_pace_weights(statistics.log_q_label, self.alpha, valid)
        if self.weighting == "exponential":
            return exponential_weights(statistics.log_q_label, self.decay) * valid
        return torch.ones_like(statistics.log_q_label) * valid

    def per_position(self, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """The weighted sum of all terms at every position, (…, K), unreduced; zero where not valid."""
        weights = self.weights(statistics, valid)
        total = torch.zeros_like(statistics.log_q_label)
        for name, weight in self.terms.items():
            if name == "streak":
                total = total + weight * streak(statistics.log_q_label, valid)
            elif name == "cross_entropy":
                # a label that the drafter cannot propose has no gradient: it would only add a constant
                value = torch.where(statistics.log_q_label > LOG_ZERO, -statistics.log_q_label, 0.0)
                total = total + weight * weights * value
            else:
                total = total + weight * weights * getattr(statistics, name)
        return total

    def __call__(self, statistics: RowStatistics, valid: Tensor) -> Tensor:
        """Summed over positions, averaged over the anchors that have a valid first position: a scalar."""
        return self.per_position(statistics, valid).sum() / valid[..., 0].sum().clamp_min(1)
