"""A path through the candidates of positions that were predicted side by side: causal-consistency path search (DiffuSpec, arXiv
2510.02358, section 4.2). Tensors and tokens, no model.

A one-pass diffusion draft gives each position's q without its neighbours' tokens. Of a few candidates a position, a
beam search takes the path that q and a model reading from left to right agree upon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

Column = list[tuple[int, float]]
"""A position's candidates: token and ln q, the most probable first."""
Reader = Callable[[tuple[int, ...], Sequence[int]], Sequence[float]]
"""(path so far, tokens) → ln p of each of them after it."""


def columns(q_KV: Tensor, mass: float, most: int, ends: Collection[int]) -> list[Column]:
    """Candidates (eq. 7): of each position the fewest most probable tokens that hold `mass` of q, or `most` where those hold
    less; and the likeliest end of sequence, so that a path may end there. None of probability 0.

    Args:
        q_KV: K distributions.
    """
    top = q_KV.double().topk(min(most, q_KV.shape[1]), dim=-1)
    before_KM = top.values.cumsum(-1).roll(1, -1)
    before_KM[:, 0] = 0.0
    kept_KM = (before_KM < mass) & (top.values > 0)
    rows = zip(kept_KM.tolist(), top.indices.tolist(), top.values.log().tolist(), strict=True)
    found = [[(t, x) for keep, t, x in zip(*row, strict=True) if keep] for row in rows]
    if ends:
        ids = sorted(ends)
        likeliest = q_KV[:, ids].double().max(-1)
        for column, q, at in zip(found, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True):
            if q > 0 and not any(token in ends for token, _ in column):
                column.append((ids[at], math.log(q)))
    return found


def best_path(
    lattice: Sequence[Column], reader: Reader, weight: float, beam: int, ends: Collection[int]
) -> list[int]:
    """One token of each column, up to the first end of sequence, which is part of the path.

    Score (eq. 8): S = Σ_i weight·ln q_i + (1 − weight)·ln p_i. The `beam` best paths are continued. Paths of one length compare by
    S; in the end those of different lengths do by S a token: as ln q and ln p are negative, S alone would prefer
    whatever ends early.
    """
    open_: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for column in lattice:
        tokens, found = [token for token, _ in column], []
        for score, path in open_:
            log_p = reader(path, tokens)
            found += [
                (score + weight * q + (1 - weight) * p, (*path, t))
                for (t, q), p in zip(column, log_p, strict=True)
            ]
        if not found:
            break
        found.sort(key=lambda x: -x[0])
        ended += [x for x in found[:beam] if x[1][-1] in ends]
        open_ = [x for x in found[:beam] if x[1][-1] not in ends]
    every = [*open_, *ended]
    return list(max(every, key=lambda x: x[0] / max(1, len(x[1])))[1])
