"""A drafter with its own vocabulary for any target: its context is the committed text in its
tokens, and what it drafts is translated into the target's tokens (decode/proposers/vocabularies.py).

The law is `point`, however the inner drafter draws. Its q is lost in translation: several drafts in
its tokens become one in the target's, and how a draft is tokenized depends on the tokens after it.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Protocol

import torch

from decode.proposers.base import Drafter, DraftSession, Request
from decode.proposers.vocabularies import VocabularyMap
from decode.speculation.proposal import Proposal


class InnerSession(Protocol):
    """A model's state for one text, in its own tokens."""

    def propose(self, text: list[int], k: int) -> list[int]:
        """At most k ≥ 1 tokens to follow the text, chosen in any way. The text grows between calls;
        its end may change."""


class InnerDrafter(Protocol):
    """A model that drafts in its own tokens and knows nothing of the target's."""

    name: str
    draft_tokens: int
    """The most tokens, of its own, in a draft."""

    def start(self) -> InnerSession:
        """Begin a text."""


class TranslatedDrafter(Drafter):
    """`inner` as a drafter over the target's vocabulary.

    Args:
        inner: see `InnerDrafter`.
        vocabulary: maps between the inner drafter's tokens and the target's. Special tokens of the
            target's chat template that the inner drafter lacks are plain text to it.
        draft_tokens: the most target tokens in a proposal; default: as many as `inner` drafts of
            its own.
    """

    def __init__(
        self, inner: InnerDrafter, vocabulary: VocabularyMap, draft_tokens: int | None = None
    ) -> None:
        self.inner, self.vocabulary = inner, vocabulary
        self.name = f"{inner.name}+translation"
        self.draft_tokens = self.draft_nodes = draft_tokens or inner.draft_tokens

    def start(self, request: Request) -> TranslatedSession:
        return TranslatedSession(self, request)


class TranslatedSession(DraftSession):
    """One request's drafts. `context`: the first `translated` committed tokens in the inner
    drafter's tokens."""

    def __init__(self, drafter: TranslatedDrafter, request: Request) -> None:
        self.drafter, self.request = drafter, request
        self.inner = drafter.inner.start()
        _, self.context = drafter.vocabulary.to_drafter(request.tokens, [])
        self.translated = len(request.tokens)

    def propose(self, k: int) -> Proposal | None:
        vocabulary, request = self.drafter.vocabulary, self.request
        kept, tail = vocabulary.to_drafter(request.tokens[self.translated :], self.context)
        self.translated = len(request.tokens)
        self.context[kept:] = tail
        most = self.drafter.inner.draft_tokens
        drafts = self.inner.propose(self.context, min(k, most) if vocabulary.same else most)
        tokens = vocabulary.to_target(drafts, request.tokens)
        # a tokenizer may have more tokens than the model has rows
        tokens = list(takewhile(lambda token: token < request.target.vocab_size, tokens))[:k]
        return (
            Proposal(torch.tensor(tokens, device=request.target.device), "point")
            if tokens
            else None
        )
