"""One drafter in several ways (steps, candidates, nodes, lengths …), whichever earlier rounds showed to be the fastest.

The ways share one session, which reads its options from its `proposer`. The choice (decode/controllers.py) looks at rounds
that are over and their times alone, before anything of the next one is drawn: each proposal keeps its law. What a seed
draws then depends on the clock, as under controller=cost: other tokens of the same law. Under verifier `gumbel` the output
is the seed's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

from align.errors import UserError
from align.target import TargetOutput
from decode.controllers import Fastest
from decode.drafters.base import Drafter, Request
from decode.proposal import Law, Proposal
from decode.sampling import Sampling


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


class SwitchingSession:
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
