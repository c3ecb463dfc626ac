"""p at every place of a text, and the statistics of a chunk of rows with their gradients, written by
hand: d(value)/d(logits) = q·(S − Σ q·S) for a slope S in q. Shapes: align/losses/divergences.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from specalign.diffusion.noise import LOG_ZERO
from specalign.kernels.fusing import fused_on_gpu
from specalign.kernels.linear import many_rows


@dataclass
class TargetPlaces:
    """p of the next token at every text position P: one pass of the head serves all anchors.

    hidden_PD: the target's last hidden states. log_z_P: log-sum-exp over the WHOLE vocabulary of
    logits/temperature. best_P: argmax p. next_P: the token that follows. log_p_next_P: its
    log-probability. finish: turns the head's product into logits, given the columns' ids or None.
    """

    hidden_PD: Tensor
    log_z_P: Tensor
    best_P: Tensor
    next_P: Tensor
    log_p_next_P: Tensor
    temperature: float = 1.0
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None


@torch.no_grad()
def target_places(
    hidden_PD: Tensor,
    next_P: Tensor,
    head: Callable[[Tensor], Tensor],
    temperature: float = 1.0,
    chunk: int = 0,
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> TargetPlaces:
    """Run the target's head, (chunk, D) → (chunk, V) logits at a time; p = softmax(logits /
    temperature). `finish`: as in `TargetPlaces`; `head` applies it already."""
    log_z, best, log_p = [], [], []
    chunk = chunk or (256 if hidden_PD.device.type == "cpu" else 4096)
    for part, following in zip(hidden_PD.split(chunk), next_P.split(chunk), strict=True):
        logits = head(part).float()
        if temperature != 1.0:
            logits = logits / temperature
        top, where = logits.max(-1)
        chosen = logits.gather(-1, following[:, None])[:, 0]
        # log-sum-exp in place: a fresh tensor of this size costs more than the sum
        log_z.append(logits.sub_(top[:, None]).exp_().sum(-1).log_().add_(top))
        best.append(where)
        log_p.append(chosen - log_z[-1])
    return TargetPlaces(
        hidden_PD, torch.cat(log_z), torch.cat(best), next_P, torch.cat(log_p), temperature, finish
    )


@dataclass
class ChunkInputs:
    """Inputs shared by all chunks of rows. keep: save log q for the backward pass instead of
    recomputing it. halves_VdD: the head's rows in 16 bits under autocast to that type. direct: rows
    are logits.
    """

    places: TargetPlaces
    head_VdD: Tensor
    draft_vocab: Tensor | None
    keep: bool
    halves_VdD: Tensor | None = None
    direct: bool = False


def _product(left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    """left @ right, or left @ rightᵀ, with fp32 sums: logits in bf16 (±0.03 at 16) would distort
    every divergence. A GPU multiplies two 16-bit factors as they are, a CPU can't. Both are made
    contiguous: a strided bf16 product onto a wide head is hundreds of times slower."""
    dtype = factor_dtype(left, right)
    left, right = left.to(dtype).contiguous(), right.to(dtype).contiguous()
    if dtype != torch.float32:
        return torch.mm(left, right.t() if transposed else right, out_dtype=torch.float32)
    return many_rows(left, right if transposed else right.t())


def _gradient(left: Tensor, right: Tensor, transposed: bool, half: torch.dtype | None) -> Tensor:
    """`_product` for a gradient. half: dtype of both factors under autocast; None: the slope is
    rounded only to match a 16-bit factor on a GPU."""
    dtype = half or min(factor_dtype(left), factor_dtype(right), key=lambda kind: kind.itemsize)
    left, right = left.to(dtype), right.to(dtype)
    if half is None or left.is_cuda:
        return _product(left, right, transposed)
    return (F.linear(left, right) if transposed else torch.mm(left, right)).float()


def factor_dtype(*factors: Tensor) -> torch.dtype:
    """The type to multiply these in: their own 16-bit type on a GPU, else fp32."""
    dtype = factors[0].dtype
    halves = dtype in (torch.bfloat16, torch.float16) and all(
        x.is_cuda and x.dtype == dtype for x in factors
    )
    return dtype if halves else torch.float32


def _logits(
    hidden_RD: Tensor, z_Rr: Tensor | None, basis_rV: Tensor | None, work: ChunkInputs
) -> Tensor:
    logits = _product(hidden_RD, work.head_VdD, True)
    if z_Rr is not None and basis_rV is not None:
        logits += _product(z_Rr, basis_rV, False)
    return logits


Near = tuple[Tensor | slice, Tensor]
"""Places, among them those of some rows, and where in them each row's is."""


def _target_rows(place_R: Tensor, near: Near | None, work: ChunkInputs) -> tuple[Tensor, Tensor]:
    """log p over the draft vocabulary at the places `near` these rows, None = at their distinct
    ones, (U, Vd), and each row's index."""
    places = work.places
    own, where = torch.unique(place_R, return_inverse=True) if near is None else near
    log_p = _product(places.hidden_PD[own], work.head_VdD, True)
    if places.finish is not None:
        log_p = places.finish(log_p, work.draft_vocab)
    if places.temperature != 1.0:
        log_p /= places.temperature
    return log_p.sub_(places.log_z_P[own][:, None]).clamp_min_(LOG_ZERO), where


def _columns(label_R: Tensor, draft_vocab: Tensor | None) -> tuple[Tensor, Tensor]:
    """Column of each label in the draft vocabulary, and whether it has one."""
    if draft_vocab is None:
        return label_R, torch.ones_like(label_R, dtype=torch.bool)
    column = torch.searchsorted(draft_vocab, label_R).clamp_max(len(draft_vocab) - 1)
    return column, draft_vocab[column] == label_R


class Statistics(torch.autograd.Function):
    """Rows of hidden states, or of logits if `work.direct`, → their statistics in the order of
    `RowStatistics`; `near`: as in `_target_rows`. With S a value's slope in q, d(value)/d(logits) = q·(S − Σ q·S); forward KL:
    (Σp)·q − p; log q of the label: one-hot − q."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        z_Rr: Tensor | None,
        basis_rV: Tensor | None,
        place_R: Tensor,
        near: Near | None,
        work: ChunkInputs,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(rows.device.type, enabled=False):
            if work.direct:
                log_q = log_z = rows.float().log_softmax(-1).clamp_min_(LOG_ZERO)
            else:
                log_q, log_z = _log_softmax(_logits(rows, z_Rr, basis_rV, work))
            log_p_U, where = _target_rows(place_R, near, work)
            outputs = _values(log_q, log_p_U, where, place_R, work)
        ctx.near, ctx.work = near, work
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[3:])
        kept = (log_q, log_p_U, where) if work.keep else (log_z, None, None)
        rows = place_R if work.direct else rows  # logits are not read again
        ctx.save_for_backward(rows, z_Rr, basis_rV, place_R, *kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, z_Rr, basis_rV, place_R, log_q, log_p_U, where = ctx.saved_tensors
        work: ChunkInputs = ctx.work
        with torch.autocast(rows.device.type, enabled=False):
            if not work.keep:
                log_q = _logits(rows, z_Rr, basis_rV, work).sub_(log_q)
                log_p_U, where = _target_rows(place_R, ctx.near, work)
            slope = _slope_of_logits(grads[:3], log_q, log_p_U, where, place_R, work)
            if work.direct:
                return slope, None, None, None, None, None
            need_hidden, need_z, need_basis = ctx.needs_input_grad[:3]
            head, half = work.head_VdD, None
            if work.halves_VdD is not None:
                head, half = work.halves_VdD, work.halves_VdD.dtype
                slope = slope.to(half)  # once for the three
            hidden = _gradient(slope, head, False, half) if need_hidden else None
            z = _gradient(slope, basis_rV, True, half) if need_z else None
            basis = _gradient(z_Rr.t(), slope, False, half) if need_basis else None
        return hidden, z, basis, None, None, None


def _values(
    log_q: Tensor, log_p_U: Tensor, where: Tensor, place_R: Tensor, work: ChunkInputs
) -> tuple[Tensor, ...]:
    label_R, best_R = work.places.next_P[place_R], work.places.best_P[place_R]
    column_R, inside_R = _columns(label_R, work.draft_vocab)
    log_q_label = torch.where(inside_R, log_q.gather(-1, column_R[:, None])[:, 0], LOG_ZERO)
    top, acceptance, forward_kl = _sums(log_q, log_p_U, where)
    match = (top if work.draft_vocab is None else work.draft_vocab[top]) == best_R
    p_label, greedy_label = work.places.log_p_next_P[place_R].exp(), label_R == best_R
    constants = (acceptance, p_label, match.float(), greedy_label.float())
    return (log_q_label, forward_kl, 1 - acceptance, *constants)


@fused_on_gpu
def _log_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log q, in the logits' own memory on a CPU, and the log-sum-exp, (R, 1)."""
    log_z = logits.logsumexp(-1, keepdim=True)
    logits -= log_z
    return logits, log_z


@fused_on_gpu
def _sums(log_q: Tensor, log_p_U: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """argmax q, Σ min(p, q) and Σ p log(p/q), (R,) each."""
    top = log_q.argmax(-1)
    p_U = log_p_U.exp()
    p, q = p_U[where], log_q.exp()
    forward_kl = (p_U * log_p_U).sum(-1)[where] - (p * log_q).sum(-1)
    acceptance = torch.minimum(p, q, out=q).sum(-1)
    return top, acceptance, forward_kl


def _slope_of_logits(
    grads: tuple[Tensor | None, ...],
    log_q: Tensor,
    log_p_U: Tensor,
    where: Tensor,
    place_R: Tensor,
    work: ChunkInputs,
) -> Tensor:
    """d(loss)/d(draft logits), (R, Vd), from d(loss)/d(log q of the label, KL, variation)."""
    zero = torch.zeros_like(log_q[:, :1])
    label, forward = (zero if grad is None else grad[:, None] for grad in grads[:2])
    column_R, inside_R = _columns(work.places.next_P[place_R], work.draft_vocab)
    label = label * inside_R[:, None]
    slope = _slope(log_q, log_p_U, where, forward, label, grads[2])
    return slope.scatter_add_(-1, column_R[:, None], label)


@fused_on_gpu
def _slope(
    log_q: Tensor,
    log_p_U: Tensor,
    where: Tensor,
    forward: Tensor,
    label: Tensor,
    variation: Tensor | None,
) -> Tensor:
    """`_slope_of_logits` without the label's one-hot part, (R, Vd)."""
    q, p_U = log_q.exp(), log_p_U.exp()
    p = p_U[where]
    total = forward * p_U.sum(-1, keepdim=True)[where] - label
    if variation is not None:
        in_q = (q < p) * -variation[:, None]
        total = total - (q * in_q).sum(-1, keepdim=True)
        slope = q.mul_(in_q.add_(total))
    else:
        slope = q.mul_(total)
    return slope.addcmul_(p, forward, value=-1)
