"""Causal-consistency path search (DiffuSpec, arXiv 2510.02358, section 4.2), and the n-gram model
that scores paths. No network.

A one-pass diffusion draft predicts each position without its neighbours' tokens. Among a few
candidates per position a beam search finds the path with the best mixture of q and a causal model:
counts of prompt, output and perhaps a corpus, each order smoothed with the next lower one
(Dirichlet prior), down to the uniform distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor

Column = list[tuple[int, float]]
"""A position's candidates: token and ln q, the most probable first."""
PathScore = Callable[[tuple[int, ...], Sequence[int]], Sequence[float]]
"""(path so far, tokens) → ln p of each of them after it."""


def find_candidates(q_KV: Tensor, mass: float, most: int, ends: Collection[int]) -> list[Column]:
    """Candidates (eq. 7): at each position the smallest set of most probable tokens with `mass` of
    q, at most `most`; and the most probable end of sequence. None has probability 0."""
    top = q_KV.double().topk(min(most, q_KV.shape[1]), dim=-1)
    before_KM = top.values.cumsum(-1).roll(1, -1)
    before_KM[:, 0] = 0.0
    kept_KM = (before_KM < mass) & (top.values > 0)
    rows = zip(kept_KM.tolist(), top.indices.tolist(), top.values.log().tolist(), strict=True)
    lattice = [[(t, x) for keep, t, x in zip(*row, strict=True) if keep] for row in rows]
    if ends:
        ids = sorted(ends)
        likeliest = q_KV[:, ids].double().max(-1)
        for column, q, at in zip(
            lattice, likeliest.values.tolist(), likeliest.indices.tolist(), strict=True
        ):
            if q > 0 and not any(token in ends for token, _ in column):
                column.append((ids[at], math.log(q)))
    return lattice


def find_best_path(
    lattice: Sequence[Column], score: PathScore, weight: float, beam: int, ends: Collection[int]
) -> list[int]:
    """One token of each column, up to and with the first end of sequence.

    Score (eq. 8): S = Σ_i weight·ln q_i + (1 − weight)·ln p_i. The `beam` best paths are continued.
    Paths of one length are compared by S, at the end those of different lengths by S per token: S
    is negative, so it would favour early ends.
    """
    open_paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for column in lattice:
        tokens = [token for token, _ in column]
        found = [
            (total + weight * log_q + (1 - weight) * log_p, (*path, token))
            for total, path in open_paths
            for (token, log_q), log_p in zip(column, score(path, tokens), strict=True)
        ]
        if not found:
            break
        found.sort(key=lambda x: -x[0])
        ended += [x for x in found[:beam] if x[1][-1] in ends]
        open_paths = [x for x in found[:beam] if x[1][-1] not in ends]
    best = max([*open_paths, *ended], key=lambda x: x[0] / max(1, len(x[1])))
    return list(best[1])


class NgramModel:
    """Counts of all n-grams of up to `order` tokens, and a smoothed distribution from them.

    Args:
        vocab_size: V.
        order: n, the tokens of the longest n-gram.
        strength: s, how many observations the shorter context's distribution is worth.
        base: a model whose counts are added to this one's; it is not changed.
    """

    def __init__(
        self, vocab_size: int, order: int = 3, strength: float = 1.0, base: NgramModel | None = None
    ) -> None:
        self.vocab_size, self.order, self.strength, self.base = vocab_size, order, strength, base
        self.counts: Counter[tuple[int, ...]] = Counter()
        """Count of each n-gram."""
        self.followed: Counter[tuple[int, ...]] = Counter()
        """How many tokens followed each context."""
        self._tail: list[int] = []

    def continue_text(self) -> NgramModel:
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
            suffix = tuple(context[len(context) - n :])
            followed = self._count_followed(suffix)
            if not followed:  # nor was any longer one
                break
            total = followed + self.strength
            p = [
                (self._count((*suffix, t)) + self.strength * x) / total
                for t, x in zip(tokens, p, strict=True)
            ]
        return [math.log(x) for x in p]

    def _count(self, ngram: tuple[int, ...]) -> int:
        return self.counts[ngram] + (0 if self.base is None else self.base._count(ngram))

    def _count_followed(self, context: tuple[int, ...]) -> int:
        return self.followed[context] + (
            0 if self.base is None else self.base._count_followed(context)
        )
