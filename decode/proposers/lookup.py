"""Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): copy what followed the last occurrence of
the text's own ending. No model, no training.

Alone, or in front of another drafter: where a long enough ending of the text occurred before, its
continuation is copied; elsewhere that drafter proposes. After a shorter match the copy is one more
path of the drafter's tree, where it proposes a tree of chosen tokens.

The text so far decides which of them proposes, before anything is drawn, so every proposal keeps
its own law. Under sampling a copy has the drafter's law with a q that has all its mass on the
copied token; token verification accepts it with probability p.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from decode.proposers.base import DraftSession, Proposer, Request, WrappingProposer, WrappingSession
from decode.speculation.proposal import DraftProbs, Proposal, point_proposal
from decode.speculation.tree_drafts import prefix_tree


class LookupSession(DraftSession):
    """One request's drafts: an index of where each n-gram of the text last ended."""

    proposer: LookupProposer

    def __init__(self, proposer: LookupProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def propose(self, k: int) -> Proposal | None:
        match = self.find()
        if match is None:
            return None
        return point_proposal(self.copy(match[0], k), self.request.target.device)

    def find(self, enough: int = 0) -> tuple[int, int] | None:
        """The place after the last earlier occurrence of the text's longest indexed ending, and the
        length of that match. A match of `longest` tokens is extended backwards, up to `enough`."""
        tokens = self.request.tokens
        shortest, longest = self.proposer.shortest, self.proposer.longest
        for end in range(self.indexed + 1, len(tokens)):  # n-grams that something follows
            for n in range(shortest, min(longest, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.indexed = len(tokens) - 1
        for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
            start = self.ends.get(tuple(tokens[-n:]))
            if start is None:
                continue
            if n == longest:
                while n < min(enough, start) and tokens[start - n - 1] == tokens[-n - 1]:
                    n += 1
            return start, n
        return None

    def copy(self, start: int, k: int) -> list[int]:
        """k tokens from `start` on; past the end of the text the copy itself is copied."""
        tokens = self.request.tokens
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(k)]


class LookupProposer(Proposer):
    """Proposes copies of K = `draft_tokens` tokens from prompt and output, which follow the longest
    ending of `shortest` to `longest` tokens."""

    name = "lookup"
    session = LookupSession

    def __init__(self, draft_tokens: int = 8, longest: int = 3, shortest: int = 1) -> None:
        self.draft_tokens = self.draft_nodes = draft_tokens
        self.longest, self.shortest = longest, shortest


SHORTEST = 3
"""The shortest match whose copy is proposed alone. After two tokens that agree 1.5 of five copied
ones are accepted, of a trained drafter's tree of five 1.4, of both in one tree 2.2."""
JOINING, JOINED_TOKENS = 2, 5
"""The shortest match whose copy joins the drafter's tree, and the length of such a copy."""
LONGEST = 6
"""The longest match looked up."""


class CopyingSession(WrappingSession):
    proposer: CopyingProposer

    def __init__(self, proposer: CopyingProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.law = proposer.law(request.sampling)
        shortest = JOINING if self.law == "point" else SHORTEST
        self.lookup = LookupSession(LookupProposer(longest=LONGEST, shortest=shortest), request)

    def propose(self, k: int) -> Proposal | None:
        drafter, lookup, device = self.proposer, self.lookup, self.request.target.device
        start, agreed = lookup.find(drafter.most_tokens) or (0, 0)
        if agreed < SHORTEST:
            drafts = self.inner.propose(min(k, drafter.inner.draft_tokens))
            # a chain may be for a target or a verifier of chains alone
            if not agreed or drafts is None or drafts.parents is None:
                return drafts
            branch = lookup.copy(start, min(k, drafter.joined_tokens))
            return prefix_tree([branch], device, drafts)
        length = drafter.copy_tokens + 2 * (agreed - SHORTEST)
        copy = point_proposal(lookup.copy(start, min(k, length, drafter.most_tokens)), device)
        if self.law == "point":
            return copy
        ids_S, column_K = copy.tokens_K.unique(return_inverse=True)
        q = DraftProbs(F.one_hot(column_K, len(ids_S)).to(torch.float32), ids_S)
        if self.law == "unmasked":  # all in one step, and decided by the text
            steps_K = torch.zeros_like(copy.tokens_K)
            return Proposal(copy.tokens_K, self.law, q, steps_K, state_only=True)
        return Proposal(copy.tokens_K, self.law, q)


class CopyingProposer(WrappingProposer):
    """`inner`, a drafter of any law, with lookup in front of it.

    Args:
        copy_tokens: length of a copy after the shortest match; every further token that agrees
            makes it two tokens longer. (SmolLM2's greedy answers to MT-Bench: 2.2 tokens of a copy
            accepted after a match of two, 4.6 after four, 7.7 after nine, 11.6 after twelve and
            more.)
        most_tokens: the longest copy. 31 and the last committed token are the 32 rows that
            `specalign.kernels` takes at a time.
    """

    session = CopyingSession

    def __init__(self, inner: Proposer, copy_tokens: int = 7, most_tokens: int = 31) -> None:
        super().__init__(inner, "lookup")
        self.copy_tokens, self.most_tokens = copy_tokens, most_tokens
        self.joined_tokens = min(JOINED_TOKENS, most_tokens)
        self.draft_tokens = max(inner.draft_tokens, most_tokens)
        self.draft_nodes = max(inner.draft_nodes + self.joined_tokens, most_tokens)
