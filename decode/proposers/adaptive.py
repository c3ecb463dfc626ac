"""Draft lengths that adapt to the acceptance and the cost of earlier rounds. They follow from
finished rounds, before anything of the next one is drawn, so proposals keep their law."""

from __future__ import annotations

from time import perf_counter

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


class Line:
    """Seconds as a linear function of a number of tokens: least squares, in which a round weighs
    `keep` times the one after it. The slope is at least 0."""

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


TRIES, PRIOR = 3, 2.0


class CostAware:
    """The draft length with the most tokens per second: (1 + Σ_(m≤n) Π_(j≤m) α_j) / (draft(n) +
    verify(n)), all measured on this request (after DuoDecoding, arXiv 2503.00784, and SpecDec++,
    2405.19715).

    The first rounds try the longest draft, a middle one and 1. By a prior worth `PRIOR` rounds a
    position is accepted as often as the one before it (the first: 1/2).

    Args:
        keep: what a round's weight is multiplied by with every further one.
    """

    def __init__(self, keep: float = 0.97) -> None:
        self.keep = keep
        self.tested: list[float] = []
        self.accepted: list[float] = []
        self.draft, self.verify = Line(keep), Line(keep)
        self.rounds = 0

    def length(self, most: int) -> int:
        if self.rounds < TRIES:
            return max(1, round(most - (most - 1) * self.rounds / (TRIES - 1)))
        best, at, reach, expected, alpha = 0.0, 1, 1.0, 1.0, 0.5
        for n in range(1, most + 1):
            if n <= len(self.tested):
                accepted = self.accepted[n - 1] + PRIOR * alpha
                alpha = accepted / (self.tested[n - 1] + PRIOR)
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


class AdaptiveSession(WrappingSession):
    proposer: AdaptiveProposer

    def __init__(self, proposer: AdaptiveProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.controller = CostAware()
        self.drafted = 0  # in the current round
        self.draft_seconds = self.proposed = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        verified = perf_counter()
        super().observe(output, kept)
        if self.drafted:
            draft_seconds = self.draft_seconds + perf_counter() - verified
            self.controller.observe(self.drafted, kept - 1, draft_seconds, verified - self.proposed)
        self.drafted = 0

    def propose(self, k: int) -> Proposal | None:
        began = perf_counter()
        proposal = self.inner.propose(max(1, min(k, self.controller.length(k))))
        self.proposed = perf_counter()
        self.draft_seconds = self.proposed - began
        self.drafted = 0 if proposal is None else proposal.depth
        return proposal


class AdaptiveProposer(WrappingProposer):
    """`inner`, whose `draft_tokens` is the longest draft, with `CostAware` lengths."""

    by_clock = True
    session = AdaptiveSession

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner, "controller")
