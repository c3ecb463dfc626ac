"""Divergences between the drafter's q and the target's p per drafted position: values and
gradients, in fp32.

Logits are computed in chunks of rows and the gradients are written by hand
(align/losses/divergence_gradients.py), so that memory is (chunk × Vd), never (rows × Vd). p is
constant; gradients reach the drafter's hidden states and the two factors of its Markov bias.
Shapes: P positions of text, R = B·A·K drafted rows, D width, r rank of the bias, Vd draft
vocabulary, V whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from align.losses.divergence_gradients import (
    ALWAYS,
    ChunkInputs,
    HiddenStatistics,
    LogitStatistics,
    factor_dtype,
)
from align.losses.target_places import TargetPlaces
from specalign.common.errors import UserError, nearest

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
_CPU_CHUNK_BYTES = 4 << 20  # of fp32 logits: what a CPU's cache holds
_CPU_CHUNK_ROWS = 128  # fewer, and the product waits for the head to be read


@dataclass
class RowStatistics:
    """What the losses need at every drafted position, (B, A, K) in fp32; None = not requested.

    With a pruned draft vocabulary q is 0 outside it while p is not:

    log_q_label: log q_k(x_k) of the token in the text; LOG_ZERO and no gradient outside the draft
    vocabulary. forward_kl: Σ p log(p/q) over the draft vocabulary. p's mass outside it would add +∞
    with gradient 0, so the value may be below 0; its gradient is exact. reverse_kl: Σ q log(q/p),
    exact, as q = 0 outside. jensen_shannon: ½ KL(p‖m) + ½ KL(q‖m), m = ½(p+q), exact: p's mass
    outside adds ½·mass·log 2. total_variation: 1 − Σ min(p, q), exact. acceptance: β = Σ min(p, q),
    the chance that token verification accepts a draw from q. No gradient. p_label: p_k(x_k). match:
    argmax q = argmax p over the whole vocabulary, 0 or 1, so 0 where the drafter cannot propose
    argmax p. greedy_label: x_k = argmax p, 0 or 1. No gradient. confidence: the logit of a head
    that predicts `acceptance`, where the drafter has one.
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
    confidence: Tensor | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> RowStatistics:
        """The same change applied to all of them."""
        changed = {name: change(value) for name, value in vars(self).items() if value is not None}
        return RowStatistics(**changed)


@dataclass
class DraftRows:
    """The drafter's R rows: hidden_RD; place_R, the text position whose p each row approximates
    (its label is the token that follows there); and the Markov bias z_Rr @ basis_rV added to the
    logits, or None."""

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
    draft_temperature: float = 1.0,
) -> RowStatistics:
    """Statistics of R rows, reshaped to `shape`; at most `chunk_rows` rows of logits are in memory
    at a time. More rows than that recompute their logits in the backward pass.

    Args:
        head_VdD: rows of the frozen head for the draft vocabulary, (Vd, D).
        draft_vocab: (Vd,) ascending target ids of those rows; None = all of V in order.
        wanted: divergences to compute, names of `DIVERGENCES`.
        temperature: p = softmax(logits / temperature), that of `places`.
        draft_temperature: q = softmax(draft logits / draft_temperature); a decoder at T has T in
            both.

    Raises:
        UserError: an unknown divergence.
        ValueError: temperatures of p that differ, or a draft vocabulary out of order.
    """
    names = _order_names(wanted)
    if temperature != places.temperature:
        raise ValueError(f"places were made at temperature {places.temperature}, not {temperature}")
    if draft_vocab is not None and not bool((draft_vocab[1:] > draft_vocab[:-1]).all()):
        raise ValueError("draft_vocab must be ascending")
    count, step = rows.hidden_RD.shape[0], chunk_rows
    if rows.hidden_RD.device.type == "cpu":
        step = min(step, max(_CPU_CHUNK_ROWS, _CPU_CHUNK_BYTES // (4 * head_VdD.shape[0])))
    halves = _halves(head_VdD)
    head_VdD = (
        head_VdD.detach().to(factor_dtype(rows.hidden_RD, places.hidden_PD, head_VdD)).contiguous()
    )
    work = ChunkInputs(
        places, head_VdD, draft_vocab, names, draft_temperature, count <= chunk_rows, halves
    )
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, count, step):
        cut = slice(start, start + step)
        z = None if rows.z_Rr is None else rows.z_Rr[cut]
        parts.append(
            HiddenStatistics.apply(rows.hidden_RD[cut], z, rows.basis_rV, rows.place_R[cut], work)
        )
    columns = [torch.cat(column).view(shape) for column in zip(*parts, strict=True)]
    return RowStatistics(**dict(zip(ALWAYS + names, columns, strict=True)))


def logit_statistics(
    logits_RV: Tensor,
    place_R: Tensor,
    places: TargetPlaces,
    head_VD: Tensor,
    wanted: frozenset[str] = frozenset(),
) -> RowStatistics:
    """Statistics of a drafter with its own head, (R,): q = softmax(logits_RV) over the vocabulary.

    Args:
        place_R: as in `DraftRows`. head_VD: the TARGET's head, which turns the hidden states of
            `places` into p.

    Raises:
        UserError: an unknown divergence.
    """
    names = _order_names(wanted)
    head_VD = head_VD.detach().to(factor_dtype(places.hidden_PD, head_VD)).contiguous()
    values = LogitStatistics.apply(
        logits_RV, place_R, ChunkInputs(places, head_VD, None, names, 1.0, True)
    )
    return RowStatistics(**dict(zip(ALWAYS + names, values, strict=True)))


def _halves(head_VdD: Tensor) -> Tensor | None:
    """The head's rows in 16 bits where training multiplies 16-bit factors; else None."""
    kind = head_VdD.device.type
    half = head_VdD.dtype == torch.get_autocast_dtype(kind) and torch.is_autocast_enabled(kind)
    return head_VdD.detach().contiguous() if half else None


def _order_names(wanted: frozenset[str]) -> tuple[str, ...]:
    """These divergences in order. Raises UserError for an unknown one."""
    for name in wanted - set(DIVERGENCES):
        raise UserError(f"objective: unknown divergence {name!r}{nearest(name, DIVERGENCES)}")
    return tuple(name for name in DIVERGENCES if name in wanted)
