"""A standalone diffusion drafter at work: K masks after the text, unmasked in T steps (SpecDiff, arXiv 2408.05636).

T = 1 draws every position from its own q, law `independent`. More steps draw some positions given those unmasked before:
from left to right that is a draw given the tokens left of each one, law `causal`, exact under every verifier that
tests drafts; in another order (`random`, or `confidence`: where q is most peaked, settled before the step draws) the law
is `unmasked`, for point mass or the hybrid rule. At temperature 0 the argmax, law `point`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from align.drafters.diffusion import DiffusionContext, DiffusionDrafter
from align.errors import UserError, nearest
from align.target import TargetOutput
from decode.drafters.base import Request
from decode.proposal import DenseQ, Law, Proposal
from decode.sampling import Sampling, best, couple, draw, probs

ORDERS = ("left_to_right", "random", "confidence")
LONGEST_CONTEXT = 4096
"""Tokens of its own that a drafter with another vocabulary may be shown."""


class DiffusionProposer:
    """A trained standalone drafter as the engine sees it.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: K, default its training's block.
        steps: T; more than K are K.
        order: a name of `ORDERS`.

    Raises:
        UserError: an unknown order.
    """

    name = "diffusion"

    def __init__(
        self,
        drafter: DiffusionDrafter,
        draft_tokens: int | None = None,
        steps: int = 1,
        order: str = "left_to_right",
    ) -> None:
        if order not in ORDERS:
            raise UserError(f"order={order!r} is unknown{nearest(order, ORDERS)}")
        self.drafter, self.steps, self.order = drafter.eval(), steps, order
        self.draft_tokens = self.draft_nodes = draft_tokens or drafter.config.block_size

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy:
            return "point"
        if min(self.steps, self.draft_tokens) == 1:
            return "independent"
        return "causal" if self.order == "left_to_right" else "unmasked"

    def start(self, request: Request) -> DiffusionDrafts:
        return DiffusionDrafts(self, request)


class DiffusionWriter:
    """A standalone drafter with a vocabulary of its own, behind `decode.drafters.translated`: argmax drafts in one pass."""

    name = "diffusion"

    def __init__(self, drafter: DiffusionDrafter, draft_tokens: int | None = None) -> None:
        self.drafter = drafter.eval()
        self.draft_tokens = draft_tokens or drafter.config.block_size

    def start(self, tokens: list[int]) -> WriterSession:
        return WriterSession(self, tokens)


class WriterSession:
    """One text, in the drafter's tokens."""

    def __init__(self, writer: DiffusionWriter, tokens: list[int]) -> None:
        self.writer = writer
        self.context = DiffusionContext(writer.drafter, LONGEST_CONTEXT)
        self.context.extend(tokens)

    def extend(self, kept: int, new_tokens: list[int]) -> None:
        """The context becomes its first `kept` tokens and these after them."""
        if kept < len(self.context.tokens):
            self.context.keep(kept)
        self.context.extend(new_tokens)

    def propose(self, k: int, sampling: Sampling) -> list[int]:
        """At most k tokens after the context."""
        if not self.context.tokens:
            return []
        block_K = torch.full((k,), self.writer.drafter.mask_id, device=self.context.device)
        return self.context.denoise(block_K).argmax(-1).tolist()


class DiffusionDrafts:
    """One request's drafts."""

    taps: tuple[int, ...] = ()

    def __init__(self, proposer: DiffusionProposer, request: Request) -> None:
        self.proposer, self.request = proposer, request
        self.law: Law = proposer.law(request.sampling) if request.noise is None else "point"
        self.context = DiffusionContext(proposer.drafter, request.cache.capacity + proposer.draft_tokens)

    def observe(self, output: TargetOutput, kept: int) -> None:
        """The text itself is all that it needs."""

    def propose(self, k: int) -> Proposal:
        context, device = self.context, self.context.device
        context.extend(self.request.tokens[len(context.tokens) :])
        block_K = torch.full((k,), self.proposer.drafter.mask_id, device=device)
        steps_K = torch.zeros(k, dtype=torch.int64, device=device)
        rows: list[Tensor | None] = [None] * k
        count = min(self.proposer.steps, k)
        sizes = [len(part) for part in torch.arange(k).tensor_split(count)]
        order = torch.randperm(k, generator=self.request.generator, device=device)
        if self.proposer.order == "left_to_right":
            order = torch.arange(k, device=device)
        for step, size in enumerate(sizes):
            logits_KV = context.denoise(block_K)
            if self.proposer.order == "confidence":
                order = self._surest(logits_KV, block_K)
                at = order[:size].sort().values
            else:
                at, order = order[:size].sort().values, order[size:]
            tokens, q = self._choose(logits_KV[at], at)
            block_K[at], steps_K[at] = tokens, step
            for i, place in enumerate(at.tolist()):
                rows[place] = None if q is None else q[i]
        if self.law == "point":
            return Proposal(block_K, "point")
        q_KV = DenseQ(torch.stack([row for row in rows if row is not None]))
        if self.law == "unmasked":
            return Proposal(block_K, "unmasked", q_KV, steps_K, state_only=True)
        return Proposal(block_K, self.law, q_KV)

    def _surest(self, logits_KV: Tensor, block_K: Tensor) -> Tensor:
        """Masked positions, the one whose q is most peaked first. Of q, not of what is drawn from it."""
        peak_K = logits_KV.log_softmax(-1).amax(-1)
        return peak_K.masked_fill(block_K != self.proposer.drafter.mask_id, -torch.inf).argsort(
            descending=True
        )

    def _choose(self, logits_RV: Tensor, at: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens for the positions `at` ahead, and the q they were drawn from."""
        request, sampling = self.request, self.request.sampling
        first, last = int(at[0]), int(at[-1])
        before = request.history.ahead(first, last - first + 1).rows(at - first)
        if request.noise is None and self.law == "point":
            return best(logits_RV, sampling, before, overwrite=True), None
        q = probs(logits_RV, sampling, before, overwrite=True)
        if request.noise is not None:
            return couple(q, request.noise, [len(request.tokens) + i for i in at.tolist()]), None
        return draw(q, request.generator), q
