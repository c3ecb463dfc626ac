"""Prompt lookup (Saxena, "Prompt Lookup Decoding", 2023): copy what followed the last occurrence of
the text's own ending. No model, no training.

The longest of the last 3, 2 or 1 tokens that occurred before is looked up.
"""

from __future__ import annotations

import torch

from decode.proposers.base import Drafter, DraftSession, Request, check_range
from decode.speculation.proposal import Proposal


class LookupDrafter(Drafter):
    """Proposes copies from prompt and output.

    Args:
        draft_tokens: K, how many tokens to copy.
        longest: the longest ending looked up, in tokens.
    """

    name = "lookup"

    def __init__(self, draft_tokens: int = 8, longest: int = 3) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("longest", longest, 1, None)
        self.draft_tokens = self.draft_nodes = draft_tokens
        self.longest = longest

    def start(self, request: Request) -> LookupSession:
        return LookupSession(request, self.longest)


class LookupSession(DraftSession):
    """One request's drafts: an index of where each n-gram of the text last ended."""

    def __init__(self, request: Request, longest: int, shortest: int = 1) -> None:
        self.request, self.longest, self.shortest = request, longest, shortest
        self.ends: dict[tuple[int, ...], int] = {}
        self.indexed = 0

    def propose(self, k: int) -> Proposal | None:
        match = self.find()
        return None if match is None else self.copy(match[0], k)

    def find(self, enough: int = 0) -> tuple[int, int] | None:
        """The place after the last earlier occurrence of the text's longest indexed ending, and the
        length of that match. A match of `longest` tokens is extended backwards, up to `enough`."""
        tokens = self.request.tokens
        for end in range(self.indexed + 1, len(tokens)):  # n-grams that something follows
            for n in range(self.shortest, min(self.longest, end) + 1):
                self.ends[tuple(tokens[end - n : end])] = end
        self.indexed = len(tokens) - 1
        for n in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            start = self.ends.get(tuple(tokens[-n:]))
            if start is not None:
                while (
                    self.longest <= n < min(enough, start)
                    and tokens[start - n - 1] == tokens[-n - 1]
                ):
                    n += 1
                return start, n
        return None

    def copy(self, start: int, k: int) -> Proposal:
        """k tokens from `start` on; past the end of the text the copy itself is copied."""
        tokens = self.request.tokens
        period = len(tokens) - start
        copied = [tokens[start + i % period] for i in range(k)]
        return Proposal(torch.tensor(copied, device=self.request.target.device), "point")
