"""Divergences between the drafter's q and the target's p per drafted position, in fp32.

Logits are computed in chunks of rows and gradients are written by hand, so that memory is
(chunk × Vd), never (rows × Vd). p is constant; gradients reach the drafter's hidden states and the
two factors of its Markov bias. Shapes: P positions of text, R = B·A·K drafted rows, D width, r rank
of the bias, Vd draft vocabulary, V whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from align.losses.divergence_gradients import (
    ChunkInputs,
    Near,
    Statistics,
    TargetPlaces,
    factor_dtype,
)

_CPU_CHUNK_BYTES = 4 << 20  # of fp32 logits: what a CPU's cache holds
_CPU_CHUNK_ROWS = 128  # with fewer, the product waits for the head to be read


@dataclass
class RowStatistics:
    """Statistics for the losses at every drafted position, (B, A, K) in fp32.

    With a pruned draft vocabulary q is 0 outside it while p is not. With gradient: log_q_label,
    log q_k(x_k) of the token in the text, LOG_ZERO outside the draft vocabulary; forward_kl,
    Σ p log(p/q) over the draft vocabulary (p's mass outside would add +∞ with gradient 0, so the
    value may be below 0); total_variation, 1 − Σ min(p, q), exact. Without: acceptance,
    β = Σ min(p, q), the chance that token verification accepts a draw from q; p_label, p_k(x_k);
    match, argmax q = argmax p; greedy_label, x_k = argmax p. confidence: the logit of a head that
    predicts `acceptance`, where the drafter has one.
    """

    log_q_label: Tensor
    forward_kl: Tensor
    total_variation: Tensor
    acceptance: Tensor
    p_label: Tensor
    match: Tensor
    greedy_label: Tensor
    confidence: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> RowStatistics:
        changed = {name: change(value) for name, value in vars(self).items() if value is not None}
        return RowStatistics(**changed)


@dataclass
class DraftRows:
    """The drafter's R rows: hidden_RD; place_R, the text position whose p each row approximates
    (its label is the token that follows there), and host_R, the same on the host; and the Markov
    bias z_Rr @ basis_rV added to the logits, or None."""

    hidden_RD: Tensor
    place_R: Tensor
    host_R: np.ndarray
    z_Rr: Tensor | None = None
    basis_rV: Tensor | None = None


def row_statistics(
    rows: DraftRows,
    places: TargetPlaces,
    head_VdD: Tensor,
    draft_vocab: Tensor | None,
    shape: tuple[int, ...],
    chunk_rows: int = 1024,
) -> RowStatistics:
    """Statistics of R rows, reshaped to `shape`; at most `chunk_rows` rows of logits are in memory
    at a time. More rows than that recompute their logits in the backward pass. `head_VdD`: rows of
    the frozen head for the draft vocabulary, ascending target ids (Vd,)."""
    count, step = rows.hidden_RD.shape[0], chunk_rows
    kind = rows.hidden_RD.device.type
    if kind == "cpu":
        step = min(step, max(_CPU_CHUNK_ROWS, _CPU_CHUNK_BYTES // (4 * head_VdD.shape[0])))
    head_VdD, halves = head_VdD.detach(), None
    if torch.is_autocast_enabled(kind) and head_VdD.dtype == torch.get_autocast_dtype(kind):
        halves = head_VdD.contiguous()
    head_VdD = head_VdD.to(factor_dtype(rows.hidden_RD, places.hidden_PD, head_VdD)).contiguous()
    work = ChunkInputs(places, head_VdD, draft_vocab, count <= chunk_rows, halves)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, count, step):
        cut = slice(start, start + step)
        z = None if rows.z_Rr is None else rows.z_Rr[cut]
        first, last = int(rows.host_R[cut].min()), int(rows.host_R[cut].max())
        near = slice(first, last + 1), rows.place_R[cut] - first
        parts.append(
            Statistics.apply(rows.hidden_RD[cut], z, rows.basis_rV, rows.place_R[cut], near, work)
        )
    return RowStatistics(*(torch.cat(column).view(shape) for column in zip(*parts, strict=True)))


def logit_statistics(
    logits_RV: Tensor,
    place_R: Tensor,
    places: TargetPlaces,
    head_VD: Tensor,
    near: Near | None = None,
) -> RowStatistics:
    """Statistics, (R,), of a drafter with its own head: q = softmax(logits_RV). head_VD: the
    TARGET's, which turns the hidden states of `places` into p. near: the distinct `place_R`; None =
    found here."""
    head_VD = head_VD.detach().to(factor_dtype(places.hidden_PD, head_VD)).contiguous()
    work = ChunkInputs(places, head_VD, None, True, direct=True)
    return RowStatistics(*Statistics.apply(logits_RV, None, None, place_R, near, work))
