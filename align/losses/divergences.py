"""Divergences between the drafter's q and the target's p at every drafted position: values and gradients, in fp32.

Logits are computed in chunks of rows and the gradients are written by hand, so that memory is (chunk × Vd), never
(rows × Vd), with no unneeded pass over a (chunk, Vd) tensor. p is constant; gradients reach the drafter's hidden states and the two factors of its Markov bias. Shapes: P positions of
text, R = B·A·K drafted rows, D width, r rank of the bias, Vd draft vocabulary, V whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from align.common.errors import UserError, nearest
from align.diffusion.parameterization import LOG_ZERO

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon", "total_variation")
_ALWAYS = ("log_q_label", "acceptance", "p_label", "match", "greedy_label")
_BLOCK_BYTES = (
    4 << 20
)  # of fp32 logits at a time on a CPU: what its cache holds, and what malloc hands back warm
_BLOCK_ROWS = 128  # fewer, and the product waits for the head to be read


@dataclass
class RowStatistics:
    """What the losses need at every drafted position; each field has shape (B, A, K), fp32 (None = not asked for).

    With a pruned draft vocabulary q is 0 outside it while p is not:

    log_q_label: log q_k(x_k) of the token in the text; LOG_ZERO and no gradient outside the draft vocabulary.
    forward_kl: Σ p log(p/q) over the draft vocabulary. p's mass outside it would add +∞ with gradient 0 and is left out.
        The value may then be below 0; its gradient is the right one.
    reverse_kl: Σ q log(q/p), the whole of it, as q = 0 outside.
    jensen_shannon: ½ KL(p‖m) + ½ KL(q‖m), m = ½(p+q), the whole of it: p's mass outside adds ½·mass·log 2.
    total_variation: 1 − Σ min(p, q), the whole of it.
    acceptance: β = Σ min(p, q), the chance that token verification accepts a draw from q. No gradient.
    p_label: p_k(x_k). match: argmax q = argmax p over the whole vocabulary, 0 or 1, so 0 where the drafter cannot
        propose argmax p. greedy_label: x_k = argmax p, 0 or 1. No gradient.
    confidence: the logit of a head that predicts `acceptance`, where the drafter has one.
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

    @property
    def in_vocabulary(self) -> Tensor:
        """Whether the drafter can propose the label at all, bool."""
        return self.log_q_label > LOG_ZERO


@dataclass
class TargetPlaces:
    """p of the next token at every text position P: one pass of the head serves all anchors.

    hidden_PD: the target's last hidden states; log_z_P: log-sum-exp over the WHOLE vocabulary of logits/temperature;
    best_P: argmax p; next_P: the token that follows in the text; log_p_next_P: its log-probability; finish: what the target
    does to its head's product (rows, columns) before it is a logit, given the columns' ids (None = all), in place or not.
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
    chunk: int = 256,
    finish: Callable[[Tensor, Tensor | None], Tensor] | None = None,
) -> TargetPlaces:
    """Run the target's head, (chunk, D) → (chunk, V) logits at a time, which are overwritten.

    p = softmax(logits / temperature). `finish`: as in `TargetPlaces`; `head` does it already.
    """
    log_z, best, log_p = [], [], []
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
    parts = (torch.cat(log_z), torch.cat(best), next_P, torch.cat(log_p))
    return TargetPlaces(hidden_PD, *parts, temperature, finish)


@dataclass
class DraftRows:
    """The drafter's R rows: hidden_RD; place_R, the text position whose p each row approximates (its label is the token that
    follows there); and the Markov bias z_Rr @ basis_rV added to the logits, or None."""

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
    """Statistics of R rows, reshaped to `shape`; at most `chunk_rows` rows of logits are in memory at a time.

    Up to `chunk_rows` rows keep their logits for the backward pass; beyond, each chunk computes them again there.

    Args:
        head_VdD: rows of the frozen head for the draft vocabulary, (Vd, D).
        draft_vocab: (Vd,) ascending target ids of those rows; None = all of V in order.
        wanted: divergences to compute, names of `DIVERGENCES`.
        temperature: p = softmax(logits / temperature), the one that `places` was made with.
        draft_temperature: q = softmax(draft logits / draft_temperature). A decoder that samples at temperature T
            divides both models' logits by T: to predict it, give T for both.

    Raises:
        UserError: an unknown divergence.
        ValueError: temperatures of p that differ, or a draft vocabulary out of order.
    """
    for name in wanted - set(DIVERGENCES):
        raise UserError(f"objective: unknown divergence {name!r}{nearest(name, DIVERGENCES)}")
    if temperature != places.temperature:
        raise ValueError(f"places were made at temperature {places.temperature}, not {temperature}")
    if draft_vocab is not None and not bool((draft_vocab[1:] > draft_vocab[:-1]).all()):
        raise ValueError("draft_vocab must be ascending")
    names = tuple(n for n in DIVERGENCES if n in wanted)
    count, step = rows.hidden_RD.shape[0], chunk_rows
    if rows.hidden_RD.device.type == "cpu":
        step = min(step, max(_BLOCK_ROWS, _BLOCK_BYTES // (4 * head_VdD.shape[0])))
    head_VdD = head_VdD.detach().to(_factor_dtype(rows.hidden_RD, places.hidden_PD, head_VdD)).contiguous()
    work = _Work(places, head_VdD, draft_vocab, names, draft_temperature, count <= chunk_rows)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, count, step):
        cut = slice(start, start + step)
        z = None if rows.z_Rr is None else rows.z_Rr[cut]
        parts.append(_Rows.apply(rows.hidden_RD[cut], z, rows.basis_rV, rows.place_R[cut], work))
    columns = [torch.cat(column).view(shape) for column in zip(*parts, strict=True)]
    return RowStatistics(**dict(zip(_ALWAYS + names, columns, strict=True)))


def logit_statistics(
    logits_RV: Tensor,
    place_R: Tensor,
    places: TargetPlaces,
    head_VD: Tensor,
    wanted: frozenset[str] = frozenset(),
) -> RowStatistics:
    """Statistics of a drafter with its own head: q = softmax(logits_RV) over the whole vocabulary; fields (R,).

    Args:
        place_R: as in `DraftRows`. head_VD: the TARGET's head, which turns the hidden states of `places` into p.

    Raises:
        UserError: an unknown divergence.
    """
    for name in wanted - set(DIVERGENCES):
        raise UserError(f"objective: unknown divergence {name!r}{nearest(name, DIVERGENCES)}")
    names = tuple(n for n in DIVERGENCES if n in wanted)
    head_VD = head_VD.detach().to(_factor_dtype(places.hidden_PD, head_VD)).contiguous()
    values = _Logits.apply(logits_RV, place_R, _Work(places, head_VD, None, names, 1.0, True))
    return RowStatistics(**dict(zip(_ALWAYS + names, values, strict=True)))


@dataclass
class _Work:
    """What all chunks share. keep: save log q for the backward pass instead of computing it again."""

    places: TargetPlaces
    head_VdD: Tensor
    draft_vocab: Tensor | None
    names: tuple[str, ...]
    draft_temperature: float
    keep: bool


def _product(left: Tensor, right: Tensor, transposed: bool) -> Tensor:
    """left @ right, or left @ rightᵀ: fp32 out of fp32 sums. A GPU multiplies two 16-bit factors as they are; a CPU
    cannot give fp32 sums of them, and rounding logits to bf16 (±0.03 at 16) would show in every divergence.

    Both are made contiguous: a strided bf16 product onto a wide head is hundreds of times slower.
    """
    dtype = _factor_dtype(left, right)
    left, right = left.to(dtype).contiguous(), right.to(dtype).contiguous()
    if dtype != torch.float32:
        return torch.mm(left, right.t() if transposed else right, out_dtype=torch.float32)
    return F.linear(left, right) if transposed else torch.mm(left, right)


def _factor_dtype(*factors: Tensor) -> torch.dtype:
    dtype = factors[0].dtype
    halves = dtype in (torch.bfloat16, torch.float16) and all(x.is_cuda and x.dtype == dtype for x in factors)
    return dtype if halves else torch.float32


def _logits(hidden_RD: Tensor, z_Rr: Tensor | None, basis_rV: Tensor | None, work: _Work) -> Tensor:
    logits = _product(hidden_RD, work.head_VdD, True)
    if z_Rr is not None and basis_rV is not None:
        logits += _product(z_Rr, basis_rV, False)
    return logits if work.draft_temperature == 1.0 else logits.div_(work.draft_temperature)


def _target_rows(place_R: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
    """log p over the draft vocabulary at the positions that these rows share, (U, Vd), and each row's index in it."""
    own, where = torch.unique(place_R, return_inverse=True)
    log_p = _product(work.places.hidden_PD[own], work.head_VdD, True)
    if work.places.finish is not None:
        log_p = work.places.finish(log_p, work.draft_vocab)
    if work.places.temperature != 1.0:
        log_p /= work.places.temperature
    return log_p.sub_(work.places.log_z_P[own][:, None]).clamp_min_(LOG_ZERO), where


def _columns(label_R: Tensor, draft_vocab: Tensor | None) -> tuple[Tensor, Tensor]:
    """Column of each label in the draft vocabulary, and whether it has one."""
    if draft_vocab is None:
        return label_R, torch.ones_like(label_R, dtype=torch.bool)
    column = torch.searchsorted(draft_vocab, label_R).clamp_max(len(draft_vocab) - 1)
    return column, draft_vocab[column] == label_R


class _Rows(torch.autograd.Function):
    """Rows of hidden states → their statistics. With g the gradient of a value and S its slope in q,
    d(value)/d(logits) = q·(S − Σ q·S); forward KL: (Σp)·q − p; log q of the label: one-hot − q."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_RD: Tensor,
        z_Rr: Tensor | None,
        basis_rV: Tensor | None,
        place_R: Tensor,
        work: _Work,
    ) -> tuple[Tensor, ...]:
        with torch.autocast(hidden_RD.device.type, enabled=False):
            log_q = _logits(hidden_RD, z_Rr, basis_rV, work)
            log_z = log_q.logsumexp(-1, keepdim=True)
            log_q -= log_z
            log_p_U, where = _target_rows(place_R, work)
            outputs = _values(log_q, log_p_U, where, place_R, work)
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1 : len(_ALWAYS)])
        kept = (log_q, log_p_U, where) if work.keep else (log_z, None, None)
        ctx.save_for_backward(hidden_RD, z_Rr, basis_rV, place_R, *kept)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_RD, z_Rr, basis_rV, place_R, log_q, log_p_U, where = ctx.saved_tensors
        work = ctx.work
        with torch.autocast(hidden_RD.device.type, enabled=False):
            if not work.keep:
                log_q = _logits(hidden_RD, z_Rr, basis_rV, work).sub_(log_q)
                log_p_U, where = _target_rows(place_R, work)
            by_name = dict(zip(_ALWAYS + work.names, grads, strict=True))
            slope = _slope_of_logits(by_name, log_q, log_p_U, where, place_R, work)
            need_hidden, need_z, need_basis = ctx.needs_input_grad[:3]
            # rounded to 16 bits only to meet a 16-bit factor on a GPU
            hidden = z = basis = None
            if need_hidden:
                hidden = _product(slope.to(_factor_dtype(work.head_VdD)), work.head_VdD, False)
            if need_z:
                z = _product(slope.to(_factor_dtype(basis_rV)), basis_rV, True)
            if need_basis:
                basis = _product(z_Rr.t(), slope.to(_factor_dtype(z_Rr)), False)
        return hidden, z, basis, None, None


class _Logits(torch.autograd.Function):
    """Rows of logits → their statistics; the slopes of `_Rows`."""

    @staticmethod
    def forward(ctx: Any, logits_RV: Tensor, place_R: Tensor, work: _Work) -> tuple[Tensor, ...]:
        with torch.autocast(logits_RV.device.type, enabled=False):
            log_q = logits_RV.float().log_softmax(-1).clamp_min_(LOG_ZERO)
            log_p_U, where = _target_rows(place_R, work)
            outputs = _values(log_q, log_p_U, where, place_R, work)
        ctx.work = work
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[1 : len(_ALWAYS)])
        ctx.save_for_backward(place_R, log_q, log_p_U, where)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        place_R, log_q, log_p_U, where = ctx.saved_tensors
        by_name = dict(zip(_ALWAYS + ctx.work.names, grads, strict=True))
        return _slope_of_logits(by_name, log_q, log_p_U, where, place_R, ctx.work), None, None


def _values(
    log_q: Tensor, log_p_U: Tensor, where: Tensor, place_R: Tensor, work: _Work
) -> tuple[Tensor, ...]:
    """The statistics in the order `_ALWAYS` + work.names."""
    label_R, best_R = work.places.next_P[place_R], work.places.best_P[place_R]
    column_R, inside_R = _columns(label_R, work.draft_vocab)
    log_q_label = torch.where(inside_R, log_q.gather(-1, column_R[:, None])[:, 0], LOG_ZERO)
    top = log_q.argmax(-1)
    match = (top if work.draft_vocab is None else work.draft_vocab[top]) == best_R
    p_U = log_p_U.exp()
    p, q = p_U[where], log_q.exp()
    values: dict[str, Tensor] = {}
    if "forward_kl" in work.names:
        values["forward_kl"] = (p_U * log_p_U).sum(-1)[where] - (p * log_q).sum(-1)
    if "reverse_kl" in work.names:
        values["reverse_kl"] = (q * (log_q - log_p_U[where])).sum(-1)
    if "jensen_shannon" in work.names:
        log_p = log_p_U[where]
        log_m = torch.logaddexp(log_p, log_q).sub_(log(2))
        inside = (p * (log_p - log_m)).sum(-1) + (q * (log_q - log_m)).sum(-1)
        values["jensen_shannon"] = 0.5 * (inside + (1 - p_U.sum(-1)[where]).clamp_min(0) * log(2))
    acceptance = torch.minimum(p, q, out=q).sum(-1)
    values["total_variation"] = 1 - acceptance
    always = (log_q_label, acceptance, work.places.log_p_next_P[place_R].exp(), match.float())
    return (*always, (label_R == best_R).float(), *(values[name] for name in work.names))


def _slope_of_logits(
    grads: dict[str, Tensor | None],
    log_q: Tensor,
    log_p_U: Tensor,
    where: Tensor,
    place_R: Tensor,
    work: _Work,
) -> Tensor:
    """d(loss)/d(draft logits before their temperature), (R, Vd), from d(loss)/d(each statistic)."""
    q, p_U = log_q.exp(), log_p_U.exp()
    p = p_U[where]
    zero = torch.zeros_like(log_q[:, :1])
    forward, label = (
        zero if (g := grads.get(n)) is None else g[:, None] for n in ("forward_kl", "log_q_label")
    )
    column_R, inside_R = _columns(work.places.next_P[place_R], work.draft_vocab)
    label = label * inside_R[:, None]
    total = forward * p_U.sum(-1, keepdim=True)[where] - label
    slopes: list[Tensor] = []  # g·S of each divergence that asks for it
    if (g := grads.get("reverse_kl")) is not None:
        slopes.append((log_q - log_p_U[where]).mul_(g[:, None]))
    if (g := grads.get("jensen_shannon")) is not None:
        log_m = torch.logaddexp(log_p_U[where], log_q).sub_(log(2))
        slopes.append(torch.sub(log_q, log_m, out=log_m).mul_(0.5 * g[:, None]))
    if (g := grads.get("total_variation")) is not None:
        slopes.append((q < p) * -g[:, None])
    if slopes:
        in_q = slopes.pop()
        for more in slopes:
            in_q += more
        total = total - (q * in_q).sum(-1, keepdim=True)
        slope = q.mul_(in_q.add_(total))
    else:
        slope = q.mul_(total)
    slope.addcmul_(p, forward, value=-1)
    slope.scatter_add_(-1, column_R[:, None], label)
    return slope if work.draft_temperature == 1.0 else slope.div_(work.draft_temperature)
