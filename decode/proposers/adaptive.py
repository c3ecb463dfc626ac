"""Draft lengths that adapt to the acceptance and the cost of earlier rounds. They follow from
finished rounds, before anything of the next one is drawn, so proposals keep their law."""

from __future__ import annotations

from time import perf_counter

import numpy as np

from decode.proposers.base import Proposer, Request, WrappingProposer, WrappingSession
from decode.speculation.proposal import Proposal
from specalign.lm.model import TargetOutput


class AdaptiveLength:
    """DiffuSpec's adaptive draft length (arXiv 2510.02358, section 4.3): L̃ ← (1 − ρ)·L̃ + ρ·L of
    generated and of accepted lengths, both from 0, then k ← clip(L̃_generated + δ·1{L̃_accepted ≥
    L̃_generated}, shortest, longest), rounded. The first k is `longest`.

    As published: 20 to 30 tokens, δ = 10, ρ = 0.5; in proportion for another longest draft.
    """

    def __init__(self, longest: int, smoothing: float = 0.5) -> None:
        self.longest = self.tokens = longest
        self.smoothing = smoothing
        self.generated = self.accepted = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        """Record a round: tokens of its draft before an end of sequence, and those accepted."""
        self.generated += self.smoothing * (drafted - self.generated)
        self.accepted += self.smoothing * (accepted - self.accepted)
        growth = self.longest / 3 if self.accepted >= self.generated else 0.0
        shortest = max(1, 2 * self.longest // 3)
        self.tokens = min(max(round(self.generated + growth), shortest), self.longest)


TRIES, PRIOR = 3, 2.0


class CostAware:
    """The draft length with the most tokens per second: (1 + Σ_(m≤n) Π_(j≤m) α_j) / seconds(n), all
    measured on this request (after DuoDecoding, arXiv 2503.00784, and SpecDec++, 2405.19715).

    The first rounds try the longest draft, a middle one and 1. The seconds of a round are a linear
    function of its drafts. By a prior worth `PRIOR` rounds a position is accepted as often as the
    one before it (the first: 1/2).

    Args:
        keep: a round weighs `keep` times the one after it.
    """

    def __init__(self, keep: float = 0.97) -> None:
        self.keep = keep
        self.rounds: list[tuple[int, int, float]] = []

    def length(self, most: int) -> int:
        count = len(self.rounds)
        if count < TRIES:
            return max(1, round(most - (most - 1) * count / (TRIES - 1)))
        drafted_R, accepted_R, seconds_R = np.array(self.rounds).T
        weight_R = self.keep ** np.arange(count)[::-1]
        lengths_K = np.arange(1, most + 1)
        tested_RK = np.minimum(accepted_R + 1, drafted_R)[:, None] >= lengths_K
        tested_K = weight_R @ tested_RK
        held_K = weight_R @ (accepted_R[:, None] >= lengths_K)
        alpha, alphas = 0.5, []
        for held, tested in zip(held_K, tested_K, strict=True):
            alpha = (held + PRIOR * alpha) / (tested + PRIOR)
            alphas.append(alpha)
        expected_K = 1 + np.cumprod(alphas).cumsum()
        drafted, seconds = (np.average(x, weights=weight_R) for x in (drafted_R, seconds_R))
        away_R = drafted_R - drafted
        spread = weight_R @ away_R**2
        slope = max(0.0, weight_R @ (away_R * seconds_R) / spread) if spread > 1e-9 else 0.0
        cost_K = np.maximum(seconds + slope * (lengths_K - drafted), 1e-9)
        return int((expected_K / cost_K).argmax()) + 1

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        self.rounds.append((drafted, accepted, seconds))


class AdaptiveSession(WrappingSession):
    proposer: AdaptiveProposer

    def __init__(self, proposer: AdaptiveProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.controller = CostAware()
        self.drafted = 0  # in the current round
        self.began = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        super().observe(output, kept)
        if self.drafted:
            self.controller.observe(self.drafted, kept - 1, perf_counter() - self.began)
        self.drafted = 0

    def propose(self, k: int) -> Proposal | None:
        self.began = perf_counter()
        proposal = self.inner.propose(max(1, min(k, self.controller.length(k))))
        self.drafted = 0 if proposal is None else proposal.depth
        return proposal


class AdaptiveProposer(WrappingProposer):
    """`inner`, whose `draft_tokens` is the longest draft, with `CostAware` lengths."""

    by_clock = True
    session = AdaptiveSession

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner, "controller")
