"""Any drafter, as long a draft as a controller says (decode/controllers.py).

The controller is asked before the inner drafter draws, and knows earlier rounds alone: a proposal keeps the inner law.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from align.target import TargetOutput
from decode.controllers import Controller, CostAware
from decode.drafters.base import Drafter, DraftSession, Request
from decode.proposal import Law, Proposal
from decode.sampling import Sampling


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


class AdaptiveSession:
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
