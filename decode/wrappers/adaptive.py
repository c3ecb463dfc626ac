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

    def __init__(self, ways: Sequence[Drafter], names: Sequence[str]) -> None:
        self.ways, self.names = list(ways), list(names)
        self.name = f"{ways[0].name}, {len(ways)} ways"
        self.draft_tokens = max(way.draft_tokens for way in ways)
        self.draft_nodes = max(way.draft_nodes for way in ways)
        self.forget()

    def forget(self) -> None:
        """As if nothing had been measured yet."""
        self.fastest = Fastest(len(self.ways))

    def law(self, sampling: Sampling) -> Law:
        """The widest one: independent draws are causal ones, and either are unmasked ones, from left to right.

        Raises:
            UserError: ways whose laws have no verifier in common.
        """
        laws = dict.fromkeys(way.law(sampling) for way in self.ways)
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
        roomiest: Any = max(drafter.ways, key=lambda way: way.draft_tokens)
        self.inner = roomiest.start(request)
        if request.noise is None:
            self.inner.law = drafter.law(request.sampling)
        self.taps = self.inner.taps
        self.way: int | None = None  # that of the round that is not over
        self.began = 0.0

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.inner.observe(output, kept)
        if self.way is not None:
            self.drafter.fastest.observe(self.way, kept, perf_counter() - self.began)
            self.way = None

    def propose(self, k: int) -> Proposal | None:
        self.began, self.way = perf_counter(), self.drafter.fastest.choose()
        self.inner.proposer = self.drafter.ways[self.way]
        return self.inner.propose(min(k, self.inner.proposer.draft_tokens))

    def close(self) -> None:
        self.inner.close()
