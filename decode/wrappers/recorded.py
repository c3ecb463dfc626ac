"""A drafter that records the first position of each of its drafts, for `decode.losslessness.conditionals`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from decode.drafters.base import Drafter, DraftSession, Request, WrappingSession
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling


class First(NamedTuple):
    """The first position of a round's drafts.

    Args:
        place: of the token in the output.
        tokens: of point drafts, the drafted ones. q_V: of others, the distribution that they are said to be drawn from.
    """

    place: int
    tokens: list[int]
    q_V: Tensor | None


class RecordedDrafter:
    """`inner`, whose `sessions`, in the order of their beginning, record the first position of every round."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name, self.draft_tokens, self.draft_nodes = inner.name, inner.draft_tokens, inner.draft_nodes
        self.sessions: list[RecordedSession] = []

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)

    def start(self, request: Request) -> RecordedSession:
        self.sessions.append(RecordedSession(self.inner.start(request), request))
        return self.sessions[-1]


class RecordedSession(WrappingSession):
    """One request's drafts."""

    def __init__(self, inner: DraftSession, request: Request) -> None:
        super().__init__(inner)
        self.request, self.prompt, self.rewinds = request, len(request.tokens), inner.rewinds
        self.rounds: list[First] = []

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
