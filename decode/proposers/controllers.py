"""How many tokens to draft next, and with which of several variants, from the times and acceptance
of earlier rounds. No model, no tensors.

A controller sees only finished rounds and answers before anything of the next one is drawn:
whatever it answers, a proposal keeps its law (decode/proposers/adaptive.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol


class Controller(Protocol):
    """Chooses the draft lengths of one request."""

    def length(self, most: int) -> int:
        """How many tokens to draft next, 1..most."""

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        """Record a finished round: `accepted` of `drafted` ≥ 1 tokens, and its times."""


@dataclass
class AdaptiveLength:
    """DiffuSpec's adaptive draft length (arXiv 2510.02358, section 4.3): L̃ ← (1 − ρ)·L̃ + ρ·L of
    generated and of accepted lengths, both from 0, then k ← clip(L̃_generated + δ·1{L̃_accepted ≥
    L̃_generated}, shortest, longest), rounded. The first k is `longest`.

    shortest, longest: of k. growth: δ. smoothing: ρ.
    """

    shortest: int
    longest: int
    growth: float
    smoothing: float
    generated: float = 0.0
    accepted: float = 0.0
    tokens: int = field(init=False)
    """k."""

    def __post_init__(self) -> None:
        self.tokens = self.longest

    def update(self, generated: int, accepted: int) -> None:
        """Record a round: tokens of its draft before an end of sequence, and how many were
        accepted."""
        self.generated += self.smoothing * (generated - self.generated)
        self.accepted += self.smoothing * (accepted - self.accepted)
        wanted = self.generated + (self.growth if self.accepted >= self.generated else 0.0)
        self.tokens = min(max(round(wanted), self.shortest), self.longest)

    def length(self, most: int) -> int:
        return min(self.tokens, most)

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        self.update(drafted, accepted)


def adaptive_range(longest: int) -> tuple[int, int, float]:
    """Shortest, longest and growth of `AdaptiveLength`: 20, 30 and 10 as published, in
    proportion."""
    return max(1, 2 * longest // 3), longest, longest / 3


class Line:
    """Seconds as a linear function of a number of tokens, by least squares with exponential
    forgetting: a round weighs `keep` times the one after it. The slope is at least 0."""

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self.sums = [0.0] * 5  # of weight, x, y, x², xy

    def add(self, x: float, y: float) -> None:
        terms = (1.0, x, y, x * x, x * y)
        self.sums = [self.keep * total + term for total, term in zip(self.sums, terms, strict=True)]

    def at(self, x: float) -> float:
        weight = self.sums[0]
        if weight == 0:
            return 0.0
        mean_x, mean_y, mean_xx, mean_xy = (total / weight for total in self.sums[1:])
        variance = mean_xx - mean_x**2
        slope = max(0.0, (mean_xy - mean_x * mean_y) / variance) if variance > 1e-9 else 0.0
        return max(mean_y + slope * (x - mean_x), 0.0)


class Curve:
    """Seconds as a function of a whole number that never falls: the monotone least-squares fit
    (pool adjacent violators) of means with exponential forgetting, linear between measurements,
    constant outside."""

    def __init__(self, keep: float) -> None:
        self.keep = keep
        self.weight: dict[int, float] = {}
        self.mean: dict[int, float] = {}

    def add(self, x: int, y: float) -> None:
        self.weight = {at: self.keep * w for at, w in self.weight.items()}
        self.weight[x] = self.weight.get(x, 0.0) + 1
        mean = self.mean.get(x, y)
        self.mean[x] = mean + (y - mean) / self.weight[x]

    def fit(self) -> list[tuple[int, float]]:
        """(x, seconds) of everything measured, both ascending."""
        pools: list[tuple[float, float, list[int]]] = []  # weight, mean, places
        for x in sorted(self.mean):
            pools.append((self.weight[x], self.mean[x], [x]))
            while len(pools) > 1 and pools[-2][1] >= pools[-1][1]:
                (w, y, xs), (v, z, ys) = pools[-2:]
                pools[-2:] = [(w + v, (w * y + v * z) / (w + v), xs + ys)]
        return [(x, y) for _, y, xs in pools for x in xs]

    def at(self, x: int) -> float:
        points = self.fit()
        for (a, y), (b, z) in pairwise(points):
            if a <= x <= b:
                return y + (z - y) * (x - a) / (b - a)
        return points[0][1] if x <= points[0][0] else points[-1][1]


class TreeSize:
    """How many of a tree's nodes, the most probable first, to verify: the number with the most
    tokens per second, (1 + g·Σ path probability) / (drafting + verifying), all measured (CaDDTree,
    arXiv 2606.01813). g corrects q's paths by what was accepted.

    Args:
        most: nodes of the largest tree.
        keep: what a round's weight is multiplied by with every further one.
        prior: weight, in tokens, of the prior that q's path probabilities are right.
    """

    def __init__(self, most: int, keep: float = 0.98, prior: float = 5.0) -> None:
        self.keep = keep
        self.accepted = self.expected = prior
        self.draft, self.verify = Curve(keep), Curve(keep)
        sizes = [max(1, round(most * share)) for share in (1, 0.5, 0.25)]
        self.untried = list(dict.fromkeys([*sizes, 1]))

    def choose(self, paths: Sequence[float]) -> int:
        """How many nodes; `paths`: the probability of each node's path under q, falling."""
        if self.untried:  # costs are not known yet
            return min(self.untried[0], len(paths))
        best, at, tokens = 0.0, 1, 1.0
        for n, probability in enumerate(paths, 1):
            tokens += self.accepted / self.expected * probability
            seconds = self.draft.at(n) + self.verify.at(n)
            if seconds > 0 and tokens / seconds > best:
                best, at = tokens / seconds, n
        return at

    def observe(
        self,
        nodes: int,
        expected: float,
        accepted: int,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Record a finished round; `expected`: the sum of its nodes' path probabilities."""
        self.untried = self.untried[1:]
        self.draft.add(nodes, draft_seconds)
        self.verify.add(nodes, verify_seconds)
        self.accepted = self.keep * self.accepted + accepted
        self.expected = self.keep * self.expected + expected


class CostAware:
    """The draft length with the most tokens per second: (1 + Σ_(m≤n) Π_(j≤m) α_j) / (draft(n) +
    verify(n)), all measured on this request (the idea of DuoDecoding, arXiv 2503.00784, and of
    SpecDec++, 2405.19715).

    Args:
        keep: what a round's weight is multiplied by with every further one.
        prior: weight, in rounds, of the prior that a position is accepted as often as the one
            before it (the first: 1/2).
        tries: rounds at the beginning that try lengths from the longest to 1, so that costs become
            known.
    """

    def __init__(self, keep: float = 0.97, prior: float = 2.0, tries: int = 3) -> None:
        self.keep, self.prior, self.tries = keep, prior, tries
        self.tested: list[float] = []
        self.accepted: list[float] = []
        self.draft, self.verify = Line(keep), Line(keep)
        self.rounds = 0

    def length(self, most: int) -> int:
        if self.rounds < self.tries:  # most, a middle one, 1
            return max(1, round(most - (most - 1) * self.rounds / max(self.tries - 1, 1)))
        best, at, reach, expected, alpha = 0.0, 1, 1.0, 1.0, 0.5
        for n in range(1, most + 1):
            if n <= len(self.tested):
                alpha = (self.accepted[n - 1] + self.prior * alpha) / (
                    self.tested[n - 1] + self.prior
                )
            reach *= alpha
            expected += reach
            seconds = self.draft.at(n) + self.verify.at(n)
            if seconds <= 0:
                return most
            if expected / seconds > best:
                best, at = expected / seconds, n
        return at

    def observe(
        self, drafted: int, accepted: int, draft_seconds: float, verify_seconds: float
    ) -> None:
        self.rounds += 1
        self.draft.add(drafted, draft_seconds)
        self.verify.add(drafted, verify_seconds)
        more = drafted - len(self.tested)
        self.tested += [0.0] * more
        self.accepted += [0.0] * more
        for j in range(min(accepted + 1, drafted)):
            self.tested[j] = self.keep * self.tested[j] + 1
            self.accepted[j] = self.keep * self.accepted[j] + (j < accepted)


class Fastest:
    """The variant with the most tokens per second: each is tried in turn, then the one with the
    highest upper confidence bound (discounted UCB, arXiv 0805.3415), because rates drift with the
    text and the machine.

    Args:
        variants: how many.
        keep: what a round's weight is multiplied by with every further one.
        tries: rounds that each variant gets first.
        boldness: c of the bound, rate·(1 + c·√(ln n / n_variant)).
    """

    def __init__(
        self, variants: int, keep: float = 0.995, tries: int = 3, boldness: float = 0.15
    ) -> None:
        self.keep, self.tries, self.boldness = keep, tries, boldness
        self.rounds, self.tokens, self.seconds = (
            [0.0] * variants,
            [0.0] * variants,
            [0.0] * variants,
        )
        self.tried = [0] * variants

    def choose(self) -> int:
        fewest = min(self.tried)
        if fewest < self.tries:
            return self.tried.index(fewest)
        return max(range(len(self.tried)), key=self._bound)

    def _bound(self, variant: int) -> float:
        rounds, total = self.rounds[variant], sum(self.rounds)
        rate = self.tokens[variant] / max(self.seconds[variant], 1e-9)
        return rate * (1 + self.boldness * math.sqrt(math.log(max(total, 1.0)) / max(rounds, 1e-9)))

    def observe(self, variant: int, tokens: int, seconds: float) -> None:
        """Record a finished round: its tokens, and the seconds of drafting and verification
        together."""
        for values in (self.rounds, self.tokens, self.seconds):
            values[:] = [self.keep * value for value in values]
        self.rounds[variant] += 1
        self.tokens[variant] += tokens
        self.seconds[variant] += seconds
        self.tried[variant] += 1
