"""A drafter with prompt lookup in front: where a long enough ending of the text occurred before,
its continuation is copied; elsewhere the drafter proposes. A copy costs no drafting, and a text
that has begun to repeat itself often continues to. After a shorter match the copy is one more path
of the drafter's tree, where it proposes a tree of chosen tokens.

The text so far decides which of them proposes, before anything is drawn, so every proposal keeps
its own law. A copied token is a draw from the distribution that has all its mass on it. Under
sampling a copy has the drafter's law with that q, and token verification accepts it with
probability p.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from decode.proposers.base import Drafter, DraftSession, Request, WrappingSession
from decode.proposers.lookup import LookupSession
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.sampling import Sampling
from decode.speculation.tree_drafts import prefix_tree


class CopyingDrafter:
    """`inner`, with lookup in front of it.

    Args:
        inner: a drafter of any law.
        copy_tokens: length of a copy after the shortest match; every further token that agrees
            makes it two tokens longer. (SmolLM2's greedy answers to MT-Bench, first 15 tokens of a
            copy: 2.2 accepted after a match of two, 4.6 after four, 7.7 after nine, 11.6 after
            twelve and more.)
        most_tokens: the longest copy. With the last committed token 31 are the 32 rows that
            `specalign.kernels` takes at a time.
        shortest: the shortest match whose copy is proposed alone. After two tokens that agree 1.5
            of five copied ones are accepted, of a trained drafter's tree of five 1.4, of both in
            one tree 2.2.
        joining: the shortest match whose copy joins the drafter's tree.
        joined_tokens: the length of such a copy.
        longest: the longest match looked up.
    """

    def __init__(
        self,
        inner: Drafter,
        copy_tokens: int = 7,
        most_tokens: int = 31,
        shortest: int = 3,
        joining: int = 2,
        joined_tokens: int = 5,
        longest: int = 6,
    ) -> None:
        self.inner = inner
        self.copy_tokens, self.most_tokens = copy_tokens, max(copy_tokens, most_tokens)
        self.shortest, self.joining, self.longest = shortest, joining, longest
        self.joined_tokens = min(joined_tokens, self.most_tokens)
        self.name = f"{inner.name}+lookup"
        self.draft_tokens = max(inner.draft_tokens, self.most_tokens)
        self.draft_nodes = max(inner.draft_nodes + self.joined_tokens, self.most_tokens)

    def law(self, sampling: Sampling) -> Law:
        return self.inner.law(sampling)

    def start(self, request: Request) -> CopyingSession:
        law = self.law(request.sampling)
        lookup = LookupSession(
            request, self.longest, self.joining if law == "point" else self.shortest
        )
        return CopyingSession(self, self.inner.start(request), lookup, law)


class CopyingSession(WrappingSession):
    """One request's drafts."""

    def __init__(
        self, drafter: CopyingDrafter, inner: DraftSession, lookup: LookupSession, law: Law
    ) -> None:
        super().__init__(inner)
        self.drafter, self.lookup, self.law = drafter, lookup, law

    def propose(self, k: int) -> Proposal | None:
        drafter, lookup = self.drafter, self.lookup
        start, agreed = lookup.find(drafter.most_tokens) or (0, 0)
        if agreed < drafter.shortest:
            drafts = self.inner.propose(min(k, drafter.inner.draft_tokens))
            # a chain may be for a target or a verifier of chains alone
            if not agreed or drafts is None or drafts.parents is None:
                return drafts
            branch_K = lookup.copy(start, min(k, drafter.joined_tokens)).tokens_K
            return prefix_tree([branch_K.tolist()], branch_K.device, drafts)
        length = drafter.copy_tokens + 2 * (agreed - drafter.shortest)
        copy = lookup.copy(start, min(k, length, drafter.most_tokens))
        if self.law == "point":
            return copy
        ids_S, column_K = copy.tokens_K.unique(return_inverse=True)
        q = DraftProbs(F.one_hot(column_K, len(ids_S)).to(torch.float32), ids_S)
        if self.law == "unmasked":  # all in one step, and decided by the text
            return Proposal(
                copy.tokens_K, self.law, q, torch.zeros_like(copy.tokens_K), state_only=True
            )
        return Proposal(copy.tokens_K, self.law, q)
