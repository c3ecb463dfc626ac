"""Any drafter, as long a draft as a controller says (decode/drafters/controllers.py).

The controller is asked before the inner drafter draws, and knows earlier rounds alone: a proposal keeps the inner law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from align.common.errors import UserError
from align.target.model import TargetOutput
from decode.drafters.base import Drafter, DraftSession, Request
from decode.drafters.controllers import Controller, CostAware, Fastest
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling


class AdaptiveDrafter:
    """`inner` under a controller of its own for every request.

    Args:
        inner: its `draft_tokens` is the most.
        controller: makes one.
    """

    def __init__(self, inner: Drafter, controller: Callable[[], Controller] = CostAware) -> None:
        self.inner, self.controller = inner, controller
        self.name = f"{inner.name}+controller"
        self.draft_tokens, self.draft_nodes = inner.draft_tokens, inner.draft_nodes

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)

    def start(self, request: Request) -> AdaptiveSession:
        return AdaptiveSession(self.inner.start(request), self.controller())


class AdaptiveSession(DraftSession):
    """One request's drafts."""

    def __init__(self, inner: DraftSession, controller: Controller) -> None:
        self.inner, self.controller = inner, controller
        self.taps = inner.taps
        self.drafted = 0  # of the round that is not over
        self.draft_seconds = self.proposed = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        now = perf_counter()
        self.inner.observe(output, kept)
        if self.drafted:
            reading = perf_counter() - now
            self.controller.observe(self.drafted, kept - 1, self.draft_seconds + reading, now - self.proposed)
        self.drafted = 0

    def propose(self, k: int) -> Proposal | None:
        started = perf_counter()
        proposal = self.inner.propose(max(1, min(k, self.controller.length(k))))
        self.proposed = perf_counter()
        self.draft_seconds = self.proposed - started
        self.drafted = 0 if proposal is None else proposal.depth
        return proposal

    def close(self) -> None:
        self.inner.close()


class SwitchingDrafter:
    """`ways` of one drafter, and what was measured of them, over all requests.

    Args:
        ways: of one class, over the same networks; their sessions read `proposer` anew for every proposal.
        names: of the ways, for what is printed.
    """

    def __init__(self, variants: Sequence[Drafter], names: Sequence[str]) -> None:
        self.variants, self.names = list(variants), list(names)
        self.name = f"{variants[0].name}, {len(variants)} ways"
        self.draft_tokens = max(variant.draft_tokens for variant in variants)
        self.draft_nodes = max(variant.draft_nodes for variant in variants)
        self.reset()

    def reset(self) -> None:
        """As if nothing had been measured yet."""
        self.fastest = Fastest(len(self.variants))

    def law(self, sampling: Sampling) -> Law:
        """The widest one: independent draws are causal ones, and either are unmasked ones, from left to right.

        Raises:
            UserError: ways whose laws have no verifier in common.
        """
        laws = dict.fromkeys(variant.law(sampling) for variant in self.variants)
        for law in ("causal", "unmasked"):
            if law in laws and set(laws) <= {"independent", "causal", law}:
                return law
        if len(laws) > 1:
            raise UserError(
                f"the ways {', '.join(self.names)} draft by different laws ({', '.join(laws)}): they can't take turns"
            )
        return next(iter(laws))

    def start(self, request: Request) -> SwitchingSession:
        return SwitchingSession(self, request)


class SwitchingSession(DraftSession):
    """One request's drafts."""

    def __init__(self, drafter: SwitchingDrafter, request: Request) -> None:
        self.drafter = drafter
        roomiest: Any = max(drafter.variants, key=lambda variant: variant.draft_tokens)
        self.inner = roomiest.start(request)
        if request.noise is None:
            self.inner.law = drafter.law(request.sampling)
        self.taps = self.inner.taps
        self.variant: int | None = None  # that of the round that is not over
        self.began = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.inner.observe(output, kept)
        if self.variant is not None:
            self.drafter.fastest.observe(self.variant, kept, perf_counter() - self.began)
            self.variant = None

    def propose(self, k: int) -> Proposal | None:
        self.began, self.variant = perf_counter(), self.drafter.fastest.choose()
        self.inner.proposer = self.drafter.variants[self.variant]
        return self.inner.propose(min(k, self.inner.proposer.draft_tokens))

    def close(self) -> None:
        self.inner.close()
