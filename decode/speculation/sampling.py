"""Logits → probabilities, by one function for target and drafter, and draws from them.

Computed in fp32, the running sum of a draw in fp64. Only here temperature 0 becomes a one-hot.
Among equal tokens the lowest id wins everywhere: in an argmax and at the edges of top-k and top-p.

On a CPU, rows that need less work get less. With `fixed` (default: on any other device) the shapes
do not depend on the values, so nothing waits for the device and a graph can be captured.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation.settings import Sampling
from specalign.kernels import choice

_TOP_P_WIDTHS = (256, 4096)


class ProcessorState(NamedTuple):
    """State of the processors for each row's prefix, including the drafts on its path: bool masks
    over the vocabulary, (V,) for all rows or (R, V); None = no token."""

    seen: Tensor | None = None
    """Tokens in prompt or output: for the repetition penalty."""
    written: Tensor | None = None
    """Tokens in the output: for the presence penalty."""
    barred: Tensor | None = None
    """Tokens that may not come next: banned ones, and EOS below the minimum length."""

    def rows(self, rows: slice | Tensor) -> ProcessorState:
        return ProcessorState(*(t if t is None or t.dim() == 1 else t[rows] for t in self))

    def columns(self, ids_S: Tensor | None) -> ProcessorState:
        """The state over some of the vocabulary; None = all of it."""
        if ids_S is None:
            return self
        return ProcessorState(*(t if t is None else t[..., ids_S] for t in self))

    @staticmethod
    def joined(states: Sequence[ProcessorState], heights: Sequence[int]) -> ProcessorState:
        """The states of several requests, one after the other; `heights`: how many rows each
        has."""
        return ProcessorState(*(_join_rows(masks, heights) for masks in zip(*states, strict=True)))


NOTHING = ProcessorState()


def _join_rows(masks: Sequence[Tensor | None], heights: Sequence[int]) -> Tensor | None:
    own = next((t for t in masks if t is not None), None)
    if own is None:
        return None
    none_V = torch.zeros_like(own[0] if own.dim() == 2 else own)
    rows = [none_V if t is None else t for t in masks]
    return torch.cat(
        [t if t.dim() == 2 else t.expand(n, -1) for t, n in zip(rows, heights, strict=True)]
    )


def _is_fixed(logits: Tensor, fixed: bool | None) -> bool:
    return logits.device.type != "cpu" if fixed is None else fixed


def apply_penalties(
    logits: Tensor,
    sampling: Sampling,
    before: ProcessorState = NOTHING,
    overwrite: bool = False,
    fixed: bool | None = None,
) -> Tensor:
    """Logits (…, V) in fp32 (fp64 stays) after repetition penalty (CTRL, arXiv 1909.05858, section
    4.1), presence penalty, and barred tokens at −∞. `overwrite`: the result may be in place."""
    given = logits
    if logits.dtype != torch.float64:
        logits = logits.float()
    if all(t is None for t in before):
        return logits
    if not overwrite and logits is given:
        logits = logits.clone()
    penalty = sampling.repetition_penalty
    if _is_fixed(logits, fixed):
        if before.seen is not None:
            penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits = torch.where(before.seen, penalised, logits)
        if before.written is not None:
            logits = torch.where(before.written, logits - sampling.presence_penalty, logits)
        return logits if before.barred is None else logits.masked_fill(before.barred, -math.inf)
    if before.seen is not None:
        # few of V: cheaper than passes over all
        places = before.seen.expand_as(logits).nonzero(as_tuple=True)
        held = logits[places]
        logits[places] = torch.where(held > 0, held / penalty, held * penalty)
    if before.written is not None:
        logits[before.written.expand_as(logits).nonzero(as_tuple=True)] -= sampling.presence_penalty
    if before.barred is not None:
        logits.masked_fill_(before.barred, -math.inf)
    return logits


def best(
    logits: Tensor,
    sampling: Sampling,
    before: ProcessorState = NOTHING,
    overwrite: bool = False,
    fixed: bool | None = None,
) -> Tensor:
    """The most probable token, (…, V) → (…): the choice at temperature 0."""
    return _argmax(apply_penalties(logits, sampling, before, overwrite, fixed), fixed)


def _argmax(logits: Tensor, fixed: bool | None) -> Tensor:
    """argmax; in C on a CPU, because torch's own is not vectorized."""
    if not logits.numel() or _is_fixed(logits, fixed) or not choice.takes(logits):
        return logits.argmax(dim=-1)
    return choice.largest(logits.view(-1, logits.shape[-1])).view(logits.shape[:-1])


def probs(
    logits: Tensor,
    sampling: Sampling,
    before: ProcessorState = NOTHING,
    overwrite: bool = False,
    fixed: bool | None = None,
) -> Tensor:
    """Logits (…, V) → probabilities (…, V) in fp32 (fp64 stays), every processor applied.

    `overwrite`: the logits may be overwritten; another (K+1, V) block costs milliseconds.
    """
    if sampling.greedy:
        tokens = best(logits, sampling, before, overwrite, fixed)
        one_hot = F.one_hot(tokens, logits.shape[-1])
        return one_hot.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    given, logits = logits, apply_penalties(logits, sampling, before, overwrite, fixed)
    if sampling.temperature != 1.0:
        own = overwrite or logits is not given
        logits = logits.div_(sampling.temperature) if own else logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1:
        keep = _best_by_sorting if _is_fixed(logits, fixed) else _best_only
        rows_RV = keep(logits.reshape(-1, logits.shape[-1]), sampling.top_k, sampling.top_p)
        out = rows_RV.reshape(logits.shape)
    else:
        out = logits.softmax(dim=-1)
    if sampling.min_p > 0:
        # on logits: rounded probabilities would separate equal ones
        least = logits.amax(dim=-1, keepdim=True) + math.log(sampling.min_p)
        out = out.masked_fill(logits < least, 0.0)
        out = out / out.sum(dim=-1, keepdim=True)
    return out


def _best_by_sorting(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """`_best_only` by sorting all rows; a stable sort settles ties by itself."""
    ranked = logits_RV.sort(dim=-1, descending=True, stable=True)
    width = top_k or logits_RV.shape[1]
    values = ranked.values[:, :width].double()
    if top_p < 1:
        total = torch.logsumexp(values if top_k else logits_RV, dim=-1, keepdim=True)
        before = (values - total).exp().cumsum(dim=-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        values = values.masked_fill(before >= top_p, -math.inf)
    kept = values.softmax(dim=-1).to(logits_RV.dtype)
    return torch.zeros_like(logits_RV).scatter(1, ranked.indices[:, :width], kept)


def _best_only(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Softmax over the tokens of every row that top-k, and then top-p, keep.

    Only ranked candidates are normalised, because a pass over V costs more than ranking. For top-p
    a few hundred mostly hold the mass; the rows that need more rank more.
    """
    out_RV, size = torch.zeros_like(logits_RV), logits_RV.shape[-1]
    widths = [min(top_k, size)] if top_k else [*(w for w in _TOP_P_WIDTHS if w < size), size]
    todo = torch.arange(len(logits_RV), device=logits_RV.device)
    for width in widths:
        part = logits_RV if len(todo) == len(logits_RV) else logits_RV[todo]
        ranked = part.topk(min(width + 1, size), dim=-1)
        values = ranked.values[:, :width].double()
        need = torch.full_like(todo[:, None], width)
        if top_p < 1:
            total = torch.logsumexp(values if top_k else part, dim=-1, keepdim=True)
            need = ((values - total).exp().cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True) + 1
        done = (need[:, 0] <= width) | (width == widths[-1])
        count = need.clamp(max=width)
        beyond = torch.arange(width, device=count.device) >= count
        rows = values.masked_fill(beyond, -math.inf).softmax(dim=-1).to(out_RV.dtype)
        out_RV[todo[done][:, None], ranked.indices[done, :width]] = rows[done]
        _settle_ties(out_RV, logits_RV, todo[done], ranked.values[done], count[done])
        todo = todo[~done]
        if len(todo) == 0:
            break
    return out_RV


def _settle_ties(
    out_RV: Tensor, logits_RV: Tensor, rows: Tensor, ranked: Tensor, count: Tensor
) -> None:
    """Compute the rows again in which the best token left out equals the last one taken."""
    edge = ranked.gather(1, count - 1)
    tied_rows = (ranked.gather(1, count.clamp(max=ranked.shape[1] - 1)) == edge) & (
        count < ranked.shape[1]
    )
    for i in tied_rows[:, 0].nonzero()[:, 0].tolist():
        row = logits_RV[rows[i]]
        above, equal = row > edge[i], row == edge[i]
        kept = above | (equal & (equal.cumsum(0) <= count[i] - above.sum()))
        out_RV[rows[i]] = row.masked_fill(~kept, -math.inf).softmax(0)


def uniform(count: int, generator: torch.Generator) -> Tensor:
    """`count` numbers in [0, 1), fp64, on the generator's device."""
    return torch.rand(count, dtype=torch.float64, generator=generator, device=generator.device)


def draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row of non-negative weights (…, V), which need not sum to 1 → int64 (…)."""
    rows = weights.shape[:-1]
    return draw_at(weights, uniform(math.prod(rows), generator).reshape(rows))


def draw_at(weights: Tensor, u: Tensor) -> Tensor:
    """Inverse-transform draws, weights (…, V), u in [0, 1) (…) → int64 (…): token i for u·total in
    [Σ_{j<i} w_j, Σ_{j≤i} w_j). A token of weight 0 is never drawn."""
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[..., -1:]
    at = torch.minimum(
        u.double()[..., None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    return torch.searchsorted(running, at, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)


def make_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A seed's generator. torch's for CPUs uses the lower 32 bits, so a longer seed is hashed
    first."""
    own = seed if seed < 2**32 else _hash_seed(str(seed))
    return torch.Generator(device).manual_seed(own)


def _hash_seed(text: str) -> int:
    """63 bits, all of which depend on the whole text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def token_numbers(seed: int, count: int, device: torch.device) -> Tensor:
    """The uniform numbers (count,), fp64, that decide the target's own tokens: one for each position
    of an output. The same text results from every draft, and without drafts."""
    return uniform(count, torch.Generator(device).manual_seed(_hash_seed(f"{seed} tokens")))


def position_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """The Gumbel noise (V,), fp64, of an absolute position in a text under a seed."""
    generator = torch.Generator(device).manual_seed(_hash_seed(f"{seed} {position}"))
    u_V = torch.rand(vocab_size, dtype=torch.float64, generator=generator, device=device)
    return -(-(u_V.log())).log()  # u = 0: −∞, never chosen


def couple(p_RV: Tensor, noise: Callable[[int], Tensor], positions: Sequence[int]) -> Tensor:
    """Draws from p with the noise of the positions: argmax of ln p + noise (Daliri et al., arXiv
    2408.07978), (R, V) → (R,). Equal p give equal tokens, with drafts and without."""
    return (p_RV.double().log() + torch.stack([noise(x) for x in positions])).argmax(-1)
