"""Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): copy what followed the last occurrence of the text's own ending. No
model, no training.

The longest of the last 3, 2 or 1 tokens that occurred before is looked up.
"""

from __future__ import annotations

import torch

from decode.drafters.base import DraftSession, Request, check_range
from decode.speculation.proposal import Law, Proposal
from decode.speculation.sampling import Sampling


class LookupDrafter:
    """Proposes copies from prompt and output.

    Args:
        draft_tokens: K, how many tokens to copy.
        longest: the longest ending looked up, in tokens.

    Raises:
        UserError: a number out of its range.
    """

    name = "lookup"

    def __init__(self, draft_tokens: int = 8, longest: int = 3) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("longest", longest, 1, None)
        self.draft_tokens = self.draft_nodes = draft_tokens
        self.longest = longest

    def law(self, sampling: Sampling) -> Law:
        return "point"

    def start(self, request: Request) -> LookupSession:
        return LookupSession(request, self.longest)


class LookupSession(DraftSession):
    """One request's drafts: an index of where each n-gram of the text last ended, which grows with the text."""

    def __init__(self, request: Request, longest: int, shortest: int = 1) -> None:
        self.request, self.longest, self.shortest = request, longest, shortest
        self.follows: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def propose(self, k: int) -> Proposal | None:
        found = self.found()
        return None if found is None else self.copy(found[0], k)

    def found(self, enough: int = 0) -> tuple[int, int] | None:
        """Where the text goes on after the last occurrence of its longest ending that is looked up, and how many tokens the text
        before that place has in common with its own ending: those looked up, and if all `longest` agree, more of them up to
        `enough`. None: no ending occurred before."""
        tokens = self.request.tokens
        for end in range(self.indexed + 1, len(tokens)):  # n-grams that something follows
            for n in range(self.shortest, min(self.longest, end) + 1):
                self.follows[tuple(tokens[end - n : end])] = end
        self.indexed = max(self.indexed, len(tokens) - 1)
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            start = self.follows.get(tuple(tokens[-n:]))
            if start is not None:
                while self.longest <= n < min(enough, start) and tokens[start - n - 1] == tokens[-n - 1]:
                    n += 1
                return start, n
        return None

    def copy(self, start: int, k: int) -> Proposal:
        """k tokens from `start` on; past the end of the text it copies from the copy, so that a cycle continues."""
        tokens = self.request.tokens
        period = len(tokens) - start
        copied = [tokens[start + i % period] for i in range(k)]
        return Proposal(torch.tensor(copied, device=self.request.target.device), "point")
