"""A standalone diffusion drafter: K masks after the text, unmasked in T steps (SpecDiff, arXiv
2408.05636).

T = 1 draws every position from its own q: law `independent`. With more steps positions are drawn
given those unmasked before: from left to right that is law `causal`; in the orders `random` and
`confidence` (where q is most peaked, decided before the step draws) `unmasked`. At temperature 0
the argmax: law `point`.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from math import ceil

import torch
from torch import Tensor

from decode.proposers.base import DraftSession, Proposer, Request, common_prefix_length
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.sampling import ProcessorState
from decode.speculation.settings import Sampling
from specalign.models.diffusion_context import DiffusionContext
from specalign.models.standalone import DiffusionDrafter


@dataclass(eq=False)
class StandaloneProposer(Proposer):
    """A proposer that drafts with a standalone drafter over the target's vocabulary. draft_tokens:
    K, default its training's block."""

    drafter: DiffusionDrafter
    draft_tokens: InitVar[int | None] = None

    def __post_init__(self, draft_tokens: int | None) -> None:
        self.drafter.eval()
        self.draft_tokens = self.draft_nodes = draft_tokens or self.drafter.config.block_size


class DiffusionSession(DraftSession):
    """One request's text as a standalone drafter's context: the base of several systems'
    sessions."""

    proposer: StandaloneProposer

    def __init__(self, proposer: StandaloneProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.drafter = proposer.drafter
        self.law: Law = request.law(proposer)
        capacity = request.cache.capacity + proposer.draft_tokens
        self.context = DiffusionContext(self.drafter, capacity)

    def append_masks(self, k: int) -> Tensor:
        """Bring the context up to date with the text; returns k masks (K,) to follow it."""
        follow(self.context, self.request.tokens)
        return torch.full((k,), self.drafter.mask_id, device=self.context.device)

    def before(self, at: Tensor) -> ProcessorState:
        """The processors' state at the positions `at` ahead, without the drafts left of them."""
        first, last = int(at[0]), int(at[-1])
        return self.request.history.ahead(first, last - first + 1).rows(at - first)


def follow(context: DiffusionContext, text: list[int]) -> None:
    """Make a context hold this text: roll it back to the common prefix and append the rest."""
    same = common_prefix_length(context.tokens, text)
    if same < len(context.tokens):
        context.keep(same)
    context.extend(text[same:])


class DiffusionDrafts(DiffusionSession):
    proposer: DiffusionProposer

    def propose(self, k: int) -> Proposal:
        # K masks also near the end of an output: q depends on their number
        block_K, order = self.append_masks(self.proposer.draft_tokens), self.proposer.order
        steps_K, q_KV, left = torch.zeros_like(block_K), None, len(block_K)
        count, undrawn = min(self.proposer.steps, left), k
        rank_K = torch.arange(left, device=self.context.device)
        if order == "random":
            rank_K = torch.randperm(left, generator=self.request.generator, device=rank_K.device)
        for step in range(count):
            logits_KV = self.context.denoise(block_K)
            # the order may look at q, never at what is drawn from it
            by_q = order == "confidence"
            rank_K = -logits_KV.log_softmax(-1).amax(-1) if by_q else rank_K.float()
            open_K = rank_K.masked_fill(block_K != self.drafter.mask_id, torch.inf)
            size = ceil(left / (count - step))
            left -= size
            at = open_K[:k].argsort()[: min(size, undrawn)].sort().values
            undrawn -= len(at)
            chosen, before = logits_KV[at], self.before(at)
            tokens, q_RV = self.request.choose(self.law, chosen, before, at.tolist())
            block_K[at], steps_K[at] = tokens, step
            if q_RV is not None:
                q_KV = q_RV.new_zeros(k, q_RV.shape[1]) if q_KV is None else q_KV
                q_KV[at] = q_RV
            if not undrawn:
                break
        q = None if q_KV is None else DraftProbs(q_KV)
        if self.law == "unmasked":
            return Proposal(block_K[:k], "unmasked", q, steps_K[:k], state_only=True)
        return Proposal(block_K[:k], self.law, q)


@dataclass(eq=False)
class DiffusionProposer(StandaloneProposer):
    """A trained standalone drafter over the target's vocabulary.

    Args:
        draft_tokens: K, default its training's block.
        steps: T, at most K.
        order: a name of `decode.systems.registry.ORDERS`.
    """

    name = "diffusion"
    session = DiffusionDrafts
    steps: int = 1
    order: str = "left_to_right"

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy:
            return "point"
        if min(self.steps, self.draft_tokens) == 1:
            return "independent"
        return "causal" if self.order == "left_to_right" else "unmasked"
