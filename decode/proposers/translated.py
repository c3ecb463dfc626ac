"""A drafter with its own vocabulary for any target (string-level exact match, arXiv 2502.05202):
its context is the committed text in its tokens, and the text that it drafts is tokenized for the
target. Law `point`: q is lost in translation. A wrong translation only costs acceptance."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch

from decode.proposers.autoregressive import CausalContext
from decode.proposers.base import DraftSession, Proposer, Request
from decode.proposers.diffusion import follow
from decode.speculation.proposal import Proposal, point_proposal
from specalign.common.errors import UserError
from specalign.lm.model import Target
from specalign.models.diffusion_context import DiffusionContext
from specalign.models.standalone import DiffusionDrafter

DRAFT_TOKENS = 4
LONGEST_CONTEXT = 4096
"""In the drafter's tokens; of a longer text it sees the later half of that."""
OVERLAP = 16
"""Committed tokens that are tokenized with a draft: its first token may depend on them."""
UNFINISHED = "\ufffd"
"""Stands for half a character at the end of a text."""


class TranslatedSession(DraftSession):
    proposer: TranslatedProposer

    def __init__(self, proposer: TranslatedProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.first = 0  # where in the text the network's context begins
        self.context = self._new_context()

    def _new_context(self) -> CausalContext | DiffusionContext:
        network = self.proposer.network
        if isinstance(network, Target):
            return CausalContext(network, network, min(network.context_limit, LONGEST_CONTEXT))
        return DiffusionContext(network, LONGEST_CONTEXT + self.proposer.draft_tokens)

    def propose(self, k: int) -> Proposal | None:
        translator, request = self.proposer.translator, self.request
        text = translator.to_drafter(request.tokens)
        drafts = self._draft(text, self.proposer.draft_tokens)
        tokens = translator.to_target(request.tokens, text, drafts)
        # a tokenizer may have more tokens than the model has rows
        tokens = list(takewhile(lambda token: token < request.target.vocab_size, tokens))[:k]
        return point_proposal(tokens, request.target.device) if tokens else None

    def _draft(self, text: list[int], k: int) -> list[int]:
        """At most k argmax drafts after the text, in the network's own tokens."""
        limit = LONGEST_CONTEXT
        if isinstance(self.proposer.network, Target):
            limit = min(limit, self.proposer.network.context_limit) - k
        if not self.first < len(text) <= self.first + limit:
            self.first = max(0, len(text) - limit // 2)
            self.context = self._new_context()
        text = text[self.first :]
        if not text:
            return []
        if isinstance(self.context, DiffusionContext):
            follow(self.context, text)
            masks_K = torch.full((k,), self.context.drafter.mask_id, device=self.context.device)
            return self.context.denoise(masks_K).argmax(-1).tolist()
        drafts: list[int] = []
        unread = self.context.follow(text)
        for _ in range(k):
            unread = self.context.read(unread).argmax(-1).tolist()
            drafts += unread
        return drafts


class TranslatedProposer(Proposer):
    """A standalone network with its own tokenizer as a drafter over the target's vocabulary.
    draft_tokens: of the network's own tokens, and the most target tokens in a proposal. Raises
    UserError for a tokenizer that does not report where in the text its tokens are."""

    session = TranslatedSession

    def __init__(
        self,
        network: DiffusionDrafter | Target,
        tokenizer: Any,
        target: Target,
        draft_tokens: int | None = None,
    ) -> None:
        for one in (tokenizer, target.tokenizer):
            if not getattr(one, "is_fast", False):
                raise UserError(f"the tokenizer {type(one).__name__} has no fast version")
        if isinstance(network, Target):
            kind, length = "autoregressive", draft_tokens or DRAFT_TOKENS
        else:
            kind, length = "diffusion", draft_tokens or network.eval().config.block_size
        self.network, self.name = network, f"{kind}+translation"
        self.draft_tokens = self.draft_nodes = length
        self.translator = Translator(tokenizer, target.tokenizer)


class Translator:
    """The same text in the tokens of a drafter's and of a target's tokenizer."""

    def __init__(self, drafter: Any, target: Any) -> None:
        self.drafter, self.target = drafter, target
        self.same = drafter.get_vocab() == target.get_vocab()
        opening = drafter("")["input_ids"][:1]
        self.opening: list[int] = opening if opening == [drafter.bos_token_id] else []

    def to_drafter(self, tokens: list[int]) -> list[int]:
        """Special tokens that the drafter lacks are written out, so that the turns of a chat stay
        apart."""
        if self.same:
            return tokens
        if tokens[:1] == [self.target.bos_token_id]:
            tokens = tokens[1:]
        text = spell(self.target, tokens).rstrip(UNFINISHED)
        return [*self.opening, *self.drafter(text, add_special_tokens=False)["input_ids"]]

    def to_target(self, before: list[int], context: list[int], drafts: list[int]) -> list[int]:
        """Drafts after a context, in the target's tokens to follow its tokens `before`. An end of
        sequence becomes the target's."""
        if self.same:
            return drafts
        end = self.drafter.eos_token_id
        ended = end in drafts
        if ended:
            drafts = drafts[: drafts.index(end)]
        known = spell(self.drafter, context[-OVERLAP:])
        text = spell(self.drafter, [*context[-OVERLAP:], *drafts])[len(known) :].rstrip(UNFINISHED)
        tokens = encode_after(self.target, spell(self.target, before[-OVERLAP:]), text)
        if ended and self.target.eos_token_id is not None:
            tokens.append(self.target.eos_token_id)
        return tokens


def spell(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def encode_after(tokenizer: Any, before: str, text: str) -> list[int]:
    """The tokens of `text`, as both together are tokenized if a token ends between them."""
    found = tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True)
    spans = found["offset_mapping"]
    first = next((i for i, (_, end) in enumerate(spans) if end > len(before)), len(spans))
    if first == len(spans) or spans[first][0] >= len(before):
        return list(found["input_ids"][first:])
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
