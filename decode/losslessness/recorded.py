"""A drafter whose first position is written down: what the verifier was told of it, for `decode.losslessness.conditionals`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from align.target.model import TargetOutput
from decode.drafters.base import Drafter, DraftSession, Request
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling


class First(NamedTuple):
    """The first position of a round's drafts.

    Args:
        place: of the token in the output.
        tokens: the drafted ones, of point drafts; `q_V`: what they are said to be drawn from, of others.
    """

    place: int
    tokens: list[int]
    q_V: Tensor | None


class RecordedDrafter:
    """`inner`, whose sessions write down the first position of every round; `sessions` in the order in which they were begun."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name, self.draft_tokens, self.draft_nodes = inner.name, inner.draft_tokens, inner.draft_nodes
        self.sessions: list[RecordedSession] = []

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)

    def start(self, request: Request) -> RecordedSession:
        self.sessions.append(RecordedSession(self.inner.start(request), request))
        return self.sessions[-1]


class RecordedSession(DraftSession):
    """One request's drafts."""

    def __init__(self, inner: DraftSession, request: Request) -> None:
        self.inner, self.request, self.prompt = inner, request, len(request.tokens)
        self.taps, self.rewinds = inner.taps, inner.rewinds
        self.rounds: list[First] = []

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.inner.observe(output, kept)

    def propose(self, k: int) -> Proposal | None:
        proposal = self.inner.propose(k)
        if proposal is not None and len(proposal):
            place = len(self.request.tokens) - self.prompt
            at_root = [i for i, parent in enumerate(proposal.tree) if parent < 0]
            if proposal.q is None:
                self.rounds.append(First(place, proposal.tokens_K[at_root].tolist(), None))
            else:
                q_KV = proposal.q.take(slice(1)).dense(self.request.target.vocab_size)
                self.rounds.append(First(place, [], q_KV[0].clone()))
        return proposal

    def close(self) -> None:
        self.inner.close()
