"""Causal-consistency path search (DiffuSpec, arXiv 2510.02358, section 4.2), and the n-gram model that scores paths. No network.

A one-pass diffusion draft predicts each position without its neighbours' tokens. Among a few candidates per position a beam
search finds the path with the best mixture of q and a causal model. That model is `NgramModel`: counts of prompt, output and
perhaps a corpus, each order smoothed with the next lower one (Dirichlet prior), down to the uniform distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

Column = list[tuple[int, float]]
"""A position's candidates: token and ln q, the most probable first."""
Reader = Callable[[tuple[int, ...], Sequence[int]], Sequence[float]]
"""(path so far, tokens) → ln p of each of them after it."""


def columns(q_KV: Tensor, mass: float, most: int, ends: Collection[int]) -> list[Column]:
    """Candidates (eq. 7): at each position the smallest set of most probable tokens with `mass` of q, at most `most`; and the
    most probable end of sequence, so that a path may end there. None has probability 0.

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

    Score (eq. 8): S = Σ_i weight·ln q_i + (1 − weight)·ln p_i. The `beam` best paths are continued. Paths of one length are
    compared by S, at the end those of different lengths by S per token: as ln q and ln p are negative, S itself would favour
    early ends.
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


class NgramModel:
    """Counts of all n-grams of up to `order` tokens, and a smoothed distribution from them.

    Args:
        vocab_size: V.
        order: n, the tokens of the longest n-gram.
        strength: s, how many observations the shorter context's distribution is worth.
        base: a model of the same vocabulary and order whose counts are added to this one's; it is not changed.
    """

    def __init__(
        self, vocab_size: int, order: int = 3, strength: float = 1.0, base: NgramModel | None = None
    ) -> None:
        self.vocab_size, self.order, self.strength, self.base = vocab_size, order, strength, base
        self.counts: dict[tuple[int, ...], int] = defaultdict(int)
        """Count of each n-gram."""
        self.followed: dict[tuple[int, ...], int] = defaultdict(int)
        """How many tokens followed each context."""
        self._tail: list[int] = []

    def continued(self) -> NgramModel:
        """A model of one more text on top of this one's counts."""
        return NgramModel(self.vocab_size, self.order, self.strength, self)

    def read(self, texts: Iterable[Sequence[int]]) -> None:
        """Count separate texts."""
        for text in texts:
            self._tail = []
            self.extend(text)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text and count them."""
        for token in tokens:
            for first in range(len(self._tail) + 1):
                context = tuple(self._tail[first:])
                self.counts[(*context, token)] += 1
                self.followed[context] += 1
            self._tail.append(token)
            del self._tail[: len(self._tail) - (self.order - 1)]

    def log_probs(self, context: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """ln p of each of the tokens after a context; its last `order` − 1 tokens matter."""
        p = [1 / self.vocab_size] * len(tokens)
        for n in range(min(self.order - 1, len(context)) + 1):
            given = tuple(context[len(context) - n :])
            followed = self._followed(given)
            if not followed:  # nor was any longer one
                break
            total = followed + self.strength
            p = [
                (self._count((*given, t)) + self.strength * x) / total for t, x in zip(tokens, p, strict=True)
            ]
        return [math.log(x) for x in p]

    def _count(self, ngram: tuple[int, ...]) -> int:
        return self.counts.get(ngram, 0) + (0 if self.base is None else self.base._count(ngram))

    def _followed(self, context: tuple[int, ...]) -> int:
        return self.followed.get(context, 0) + (0 if self.base is None else self.base._followed(context))
