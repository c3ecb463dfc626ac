"""A smaller causal language model as the drafter (Leviathan et al., arXiv 2211.17192; Chen et al.,
arXiv 2302.01318).

Each draft is drawn from the model's distribution given the text and the drafts before it (law
`causal`); at temperature 0 it is the argmax (law `point`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.proposers.base import DraftSession, Proposer, Request, common_prefix_length
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.settings import Sampling
from decode.speculation.tree import chain
from specalign.common.errors import UserError
from specalign.lm.model import Target

READ_AT_ONCE = 2048


def count_missing(model: Target, target: Target) -> int:
    """How many of the target's tokens a model lacks, below 0 if it has more: models of one family
    may have one tokenizer and different numbers of unused rows. Raises UserError for another
    vocabulary than the target's."""
    missing = target.vocab_size - model.vocab_size
    if missing and model.tokenizer.get_vocab() != target.tokenizer.get_vocab():
        sizes = f"{model.spec!r} {model.vocab_size}, target {target.spec!r} {target.vocab_size}"
        raise UserError(f"vocabulary mismatch: drafter {sizes}; pass --drafter-tokenizer")
    return missing


def fit_vocabulary(logits: Tensor, missing: int) -> Tensor:
    """A model's logits (…, V) over the target's vocabulary."""
    return F.pad(logits, (0, missing), value=-torch.inf) if missing else logits


class CausalContext:
    """A causal language model's cache over one text that grows and is rolled back; `tokens`: what
    the cache holds. capacity: the longest text plus the drafts read after it. Raises UserError as
    `count_missing` does."""

    def __init__(self, model: Target, target: Target, capacity: int) -> None:
        self.model = model
        self.missing = count_missing(model, target)
        self.cache = model.new_cache(1, capacity)
        self.tokens: list[int] = []

    def follow(self, text: list[int]) -> list[int]:
        """Roll back to the common prefix with `text`; returns its unread tokens, at least one."""
        count = min(common_prefix_length(self.tokens, text), len(text) - 1)
        self.cache.length = count
        del self.tokens[count:]
        return text[count:]

    @torch.no_grad()
    def read(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> Tensor:
        """Read at least one token, and N drafts after them. Returns logits (1 + N, V) over the
        target's vocabulary in fp32, after the last token and after each draft."""
        rest = list(tokens)
        while len(rest) > READ_AT_ONCE:
            self._forward(rest[:READ_AT_ONCE])
            rest = rest[READ_AT_ONCE:]
        hidden_1LD = self._forward([*rest, *drafts])
        return fit_vocabulary(self.model.head(hidden_1LD[:, -len(drafts) - 1 :])[0], self.missing)

    def _forward(self, tokens: list[int]) -> Tensor:
        row_1L = torch.tensor([tokens], device=self.model.device)
        row_1L.clamp_(max=self.model.vocab_size - 1)  # an unused row of the target's
        self.tokens += tokens
        return self.model.forward(row_1L, cache=self.cache, logits=False).hidden_BLD


class AutoregressiveSession(DraftSession):
    proposer: AutoregressiveProposer

    def __init__(self, proposer: AutoregressiveProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.law: Law = request.law(proposer)
        self.context = CausalContext(proposer.model, request.target, request.cache.capacity)

    def propose(self, k: int) -> Proposal | None:
        request, device = self.request, self.request.target.device
        # the last draft is not read
        k = min(k, self.context.model.context_limit + 1 - len(request.tokens))
        if k < 1:
            return None
        unread = self.context.follow(request.tokens)
        tokens_K = torch.zeros(k, dtype=torch.int64, device=device)
        rows: list[Tensor] = []
        for i in range(k):
            logits_1V = self.context.read(unread).to(device)
            before = request.history.rows(tokens_K[:i], chain(i)).rows(slice(i, i + 1))
            tokens_K[i : i + 1], q_1V = request.choose(self.law, logits_1V, before, [i])
            if q_1V is not None:
                rows.append(q_1V)
            unread = [int(tokens_K[i])]
        return Proposal(tokens_K, self.law, DraftProbs(torch.cat(rows)) if rows else None)


@dataclass(eq=False)
class AutoregressiveProposer(Proposer):
    """A causal language model over the target's vocabulary, perhaps on another device. `start`
    raises UserError for another vocabulary."""

    name = "autoregressive"
    session = AutoregressiveSession
    model: Target
    draft_tokens: int = 4

    def law(self, sampling: Sampling) -> Law:
        return "point" if sampling.greedy else "causal"
