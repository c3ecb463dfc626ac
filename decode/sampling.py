"""Logits → probabilities, one function for target and drafter, and draws from them.

Everything is computed in fp32 (a draw's running sum in fp64). Temperature 0 is a one-hot here and nowhere
else. Ties are broken by the lowest token id everywhere: argmax, the edge of top-k, the edge of top-p.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from align.errors import UserError

MIN_TEMPERATURE = 1e-3
_TOP_P_WIDTHS = (256, 4096)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Applied in this order: repetition penalty, temperature, top-k, top-p (the order of transformers'
    `generate`).

    Raises:
        UserError: a value outside its range.
    """

    temperature: float = 0.0
    """0 = always the most probable token, else at least 0.001."""
    top_p: float = 1.0
    """Keep the most probable tokens until their mass reaches this; 1 = all."""
    top_k: int = 0
    """Keep this many most probable tokens; 0 = all."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in the text (prompt included) are divided by this if positive, else
    multiplied; 1 = off."""
    seed: int = 0
    """Seeds the generator of a request; the same seed and settings give the same output."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, range_: str) -> None:
            if not ok:
                raise UserError(f"{name}={getattr(self, name)!r}: must be {range_}")

        for name in ("temperature", "top_p", "repetition_penalty"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            need(number, name, "a finite number")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            need(isinstance(value, int) and not isinstance(value, bool), name, "a whole number")
        need(
            self.temperature == 0 or self.temperature >= MIN_TEMPERATURE,
            "temperature",
            f"0 (greedy) or at least {MIN_TEMPERATURE}",
        )
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(self.top_k >= 0, "top_k", "0 (off) or more")
        need(self.repetition_penalty > 0, "repetition_penalty", "above 0 (1 = off)")
        need(0 <= self.seed < 2**63, "seed", "from 0 to 2**63 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def penalised(logits: Tensor, sampling: Sampling, seen: Tensor | None, overwrite: bool = False) -> Tensor:
    """Logits (…, V) in fp32 (fp64 stays) after the repetition penalty (CTRL, arXiv 1909.05858 section 4.1).

    `seen`: bool, broadcastable to the logits, True where the token occurs in that row's own prefix; None =
    nowhere. `overwrite`: the logits' memory may be used for the result.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    penalty = sampling.repetition_penalty
    if seen is None or penalty == 1.0:
        return logits
    places = seen.expand_as(logits).nonzero(as_tuple=True)  # few of V: cheaper than passes over all
    held = logits[places]
    logits = logits if overwrite else logits.clone()
    logits[places] = torch.where(held > 0, held / penalty, held * penalty)
    return logits


def best(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, overwrite: bool = False) -> Tensor:
    """The most probable token, (…, V) → (…), the lowest id among equals: temperature 0 without a one-hot."""
    return penalised(logits, sampling, seen, overwrite).argmax(dim=-1)


def probs(logits: Tensor, sampling: Sampling, seen: Tensor | None = None, overwrite: bool = False) -> Tensor:
    """Logits (…, V) → probabilities (…, V) in fp32 (fp64 stays fp64), every processor applied.

    Args:
        logits: of any floating type.
        seen: bool, broadcastable to the logits, True where the token occurs in that row's own prefix,
            accepted drafts of its path included; only the repetition penalty looks at it.
        overwrite: the logits are not needed any more; a fresh (K+1, V) block of memory costs milliseconds.
    """
    if sampling.greedy:
        one_hot = F.one_hot(best(logits, sampling, seen, overwrite), logits.shape[-1])
        return one_hot.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    given, logits = logits, penalised(logits, sampling, seen, overwrite)
    if sampling.temperature != 1.0:
        own = overwrite or logits is not given
        logits = logits.div_(sampling.temperature) if own else logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1] or sampling.top_p < 1:
        rows_RV = _best_only(logits.reshape(-1, logits.shape[-1]), sampling.top_k, sampling.top_p)
        return rows_RV.reshape(logits.shape)
    return logits.softmax(dim=-1)


def _best_only(logits_RV: Tensor, top_k: int, top_p: float) -> Tensor:
    """Softmax over what top-k, and then top-p on what top-k left, keep of every row.

    Passes over V cost more than the ranking, so only the ranked candidates are normalised. Without top-k a
    full sort is seldom needed either: a few hundred candidates hold the mass, and rows in need get more.
    """
    out_RV, size = torch.zeros_like(logits_RV), logits_RV.shape[-1]
    widths = [min(top_k, size)] if top_k else [*(w for w in _TOP_P_WIDTHS if w < size), size]
    todo = torch.arange(len(logits_RV), device=logits_RV.device)
    for width in widths:
        part = logits_RV if len(todo) == len(logits_RV) else logits_RV[todo]
        ranked = part.topk(min(width + 1, size), dim=-1)
        values = ranked.values[:, :width].double()
        mass = (
            (values - torch.logsumexp(values if top_k else part, dim=-1, keepdim=True)).exp().cumsum(dim=-1)
        )
        need = (
            (mass < top_p).sum(dim=-1, keepdim=True) + 1
            if top_p < 1
            else torch.full_like(todo[:, None], width)
        )
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


def _settle_ties(out_RV: Tensor, logits_RV: Tensor, rows: Tensor, ranked: Tensor, count: Tensor) -> None:
    """Redo the rows whose next candidate equals the last one kept: among equals the lowest ids stay."""
    edge = ranked.gather(1, count - 1)
    tied_rows = (ranked.gather(1, count.clamp(max=ranked.shape[1] - 1)) == edge) & (count < ranked.shape[1])
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
    """The inverse of the cumulated weights at u in [0, 1): token i for u·total in [Σ_{j<i} w_j, Σ_{j≤i} w_j).

    Summed in fp64; a token of weight 0 is never drawn. weights (…, V), u (…) → int64 (…).
    """
    running = weights.cumsum(dim=-1, dtype=torch.float64)
    total = running[..., -1:]
    at = torch.minimum(u.double()[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(running, at, right=True)[..., 0].clamp(max=weights.shape[-1] - 1)


def position_noise(seed: int, position: int, vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise (V,) in fp64 that belongs to an absolute position of a text and to a seed: the same whenever and
    however often it is asked for."""
    key = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(key, "little") >> 1)
    u_V = torch.rand(vocab_size, dtype=torch.float64, generator=generator, device=device)
    return -(-(u_V.log())).log()  # u = 0: −∞, never chosen


def couple(p_RV: Tensor, noise: Callable[[int], Tensor], positions: Sequence[int]) -> Tensor:
    """Draws from p by noise that belongs to the positions (`position_noise`): argmax of ln p + noise (Daliri et al., arXiv
    2408.07978) → (R,).

    A function of (p, seed, position) alone: with and without drafts, and however they were made, the same tokens come
    out wherever p is the same.
    """
    return (p_RV.double().log() + torch.stack([noise(x) for x in positions])).argmax(-1)


def seen_tokens(tokens: list[int], vocab_size: int, device: torch.device) -> Tensor:
    """Bool (V,): True for every token that occurs in `tokens`."""
    seen_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    seen_V[torch.tensor(tokens, dtype=torch.int64, device=device)] = True
    return seen_V


def seen_rows(seen_V: Tensor, tokens_K: Tensor, before_MK: Tensor | None = None) -> Tensor:
    """Bool (K+1, V): what each row's own prefix holds, `seen_V` and the drafts before it: tokens_K[:i] for row i, or
    those that row i of `before_MK` names (a tree's ancestors).

    `seen_V` must hold at least one token.
    """
    K = tokens_K.shape[0]
    known = seen_V.int().argmax()
    if before_MK is None:
        before_MK = torch.ones(K + 1, K, dtype=torch.bool, device=tokens_K.device).tril(-1)
    return seen_V.repeat(K + 1, 1).scatter_(1, torch.where(before_MK, tokens_K, known), True)
