"""Drafters that adapt to the cost and the acceptance of earlier rounds
(decode/proposers/controllers.py). `AdaptiveDrafter` chooses the draft length; `SwitchingDrafter`
chooses among variants of one drafter.

Both choose before anything of a round is drawn, by finished rounds alone, so every proposal keeps
the inner drafter's law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from decode.proposers.base import Drafter, DraftSession, Request, WrappingSession
from decode.proposers.controllers import Controller, CostAware, Fastest
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling
from specalign.common.errors import UserError
from specalign.lm.model import TargetOutput


class AdaptiveDrafter:
    """`inner`, with its draft length chosen by a controller.

    Args:
        inner: its `draft_tokens` is the longest draft.
        controller: makes a request's controller.
    """

    by_clock = True

    def __init__(self, inner: Drafter, controller: Callable[[], Controller] = CostAware) -> None:
        self.inner, self.controller = inner, controller
        self.name = f"{inner.name}+controller"
        self.draft_tokens, self.draft_nodes = inner.draft_tokens, inner.draft_nodes

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)

    def start(self, request: Request) -> AdaptiveSession:
        return AdaptiveSession(self.inner.start(request), self.controller())


class AdaptiveSession(WrappingSession):
    """One request's drafts."""

    def __init__(self, inner: DraftSession, controller: Controller) -> None:
        super().__init__(inner)
        self.controller = controller
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


class SwitchingDrafter:
    """Variants of one drafter that differ in their options. Their measured speeds are shared by all
    requests.

    Args:
        variants: drafters of one class over the same networks, whose sessions read `proposer` at
            every proposal.
        names: of the variants, for messages.
    """

    by_clock = True

    def __init__(self, variants: Sequence[Drafter], names: Sequence[str]) -> None:
        self.variants, self.names = list(variants), list(names)
        self.name = f"{variants[0].name}, {len(variants)} variants"
        self.draft_tokens = max(variant.draft_tokens for variant in variants)
        self.draft_nodes = max(variant.draft_nodes for variant in variants)
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self.fastest = Fastest(len(self.variants))

    def law(self, sampling: Sampling) -> Law:
        """The widest of the variants' laws: independent drafts are causal ones, and both are
        unmasked ones.

        Raises:
            UserError: no verifier is exact for all variants.
        """
        laws = dict.fromkeys(variant.law(sampling) for variant in self.variants)
        for law in ("causal", "unmasked"):
            if law in laws and set(laws) <= {"independent", "causal", law}:
                return law
        if len(laws) > 1:
            raise UserError(
                f"the variants {', '.join(self.names)} draw drafts in different ways "
                f"({', '.join(laws)}): no "
                "verifier fits all"
            )
        return next(iter(laws))

    def start(self, request: Request) -> SwitchingSession:
        return SwitchingSession(self, request)


class SwitchingSession(WrappingSession):
    """One request's drafts."""

    inner: Any

    def __init__(self, drafter: SwitchingDrafter, request: Request) -> None:
        longest = max(drafter.variants, key=lambda variant: variant.draft_tokens)
        super().__init__(longest.start(request))
        self.drafter = drafter
        if request.noise is None:
            self.inner.law = drafter.law(request.sampling)
        self.variant: int | None = None  # of the current round
        self.began = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        super().observe(output, kept)
        if self.variant is not None:
            self.drafter.fastest.observe(self.variant, kept, perf_counter() - self.began)
            self.variant = None

    def propose(self, k: int) -> Proposal | None:
        self.began, self.variant = perf_counter(), self.drafter.fastest.choose()
        self.inner.proposer = self.drafter.variants[self.variant]
        return self.inner.propose(min(k, self.inner.proposer.draft_tokens))
