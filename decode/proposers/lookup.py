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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from decode.proposers.base import DraftSession, Proposer, Request, WrappingProposer, WrappingSession
from decode.speculation.proposal import DraftProbs, Proposal, point_proposal
from decode.speculation.settings import MOST_NODES
from decode.speculation.tree_drafts import prefix_tree

Tokens = np.ndarray[tuple[int], np.dtype[np.int64]]


def keep_longest(text: Tokens, ends: Tokens, context: Tokens, most: int) -> tuple[Tokens, int]:
    """Of the places `ends` in a text (ascending) those before which it agrees longest with the end
    of `context`, and that length; no more than `most` tokens are compared."""
    length = 0
    while len(ends) and length < min(most, len(context)):
        longer = ends[1:] if ends[0] == length else ends  # no token stands before the first place
        longer = longer[text[longer - length - 1] == context[-length - 1]]
        if not len(longer):
            break
        ends = longer
        length += 1
    return ends, length


class TokenIndex:
    """A text in which the endings of a context are looked up."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self.tokens: Tokens = np.array(tokens, dtype=np.int64)

    def follow(self, text: Sequence[int]) -> None:
        """Hold this text, of which at most a draft at the end has been replaced."""
        kept = max(0, min(len(self.tokens), len(text)) - MOST_NODES - 1)
        self.tokens = np.concatenate((self.tokens[:kept], np.array(text[kept:], dtype=np.int64)))

    def places_after(self, token: int) -> Tokens:
        """The places after this token at which the text continues, ascending."""
        return np.flatnonzero(self.tokens[:-1] == token) + 1

    def match(self, context: Tokens, most: int | None = None) -> tuple[Tokens, int]:
        """The places after the context's longest suffix that occurs here, of at most `most` tokens,
        and its length."""
        places = self.places_after(context[-1])
        return keep_longest(self.tokens, places, context, most or len(context))


class LookupSession(DraftSession):
    proposer: LookupProposer

    def __init__(self, proposer: LookupProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.text = TokenIndex()

    def propose(self, k: int) -> Proposal | None:
        match = self.find()
        if match is None:
            return None
        return point_proposal(self.copy(match[0], k), self.request.target.device)

    def find(self, enough: int = 0) -> tuple[int, int] | None:
        """The place after the last earlier occurrence of the text's longest ending, and the length
        of that match. A match of `longest` tokens is extended backwards, up to `enough`."""
        self.text.follow(self.request.tokens)
        tokens, longest = self.text.tokens, self.proposer.longest
        ends, length = self.text.match(tokens, longest)
        if length < self.proposer.shortest:
            return None
        if length == longest:
            length = max(length, keep_longest(tokens, ends[-1:], tokens, enough)[1])
        return int(ends[-1]), length

    def copy(self, start: int, k: int) -> list[int]:
        """k tokens from `start` on; past the end of the text the copy itself is copied."""
        tokens = self.request.tokens
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(k)]


@dataclass(eq=False)
class LookupProposer(Proposer):
    """Proposes copies of K = `draft_tokens` tokens from prompt and output, which follow the longest
    ending of `shortest` to `longest` tokens."""

    name = "lookup"
    session = LookupSession
    draft_tokens: int = 8
    longest: int = 3
    shortest: int = 1


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
