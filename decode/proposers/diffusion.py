"""A standalone diffusion drafter: K masks after the text, unmasked in T steps (SpecDiff, arXiv
2408.05636).

T = 1 draws every position from its own q: law `independent`. With more steps positions are drawn
given those unmasked before: from left to right that is law `causal`. In the other orders (`random`;
`confidence`: where q is most peaked, decided before the step draws; `blockwise`: by confidence
within blocks of two steps each, the blocks from left to right) the law is `unmasked`. At
temperature 0 the argmax: law `point`.

Hot start: the first step draws from what the last draft's steps predicted for the positions after
the rejected token, instead of running the network. Only distributions are reused, no drawn token,
so each position again has a q that was fixed before its token was drawn.

Trees (T = 1): the most probable paths under the marginals, law `point`; or drawn, for verifiers
that test siblings.
"""

from __future__ import annotations

from math import ceil
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from decode.proposers.base import Drafter, DraftSession, Request, check_range, common_prefix_length
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.sampling import ProcessorState, Sampling, apply_penalties, probs
from decode.speculation.tree_drafts import draw_tree, drawn_tree_parents, tree_from_marginals
from specalign.common.errors import UserError, nearest
from specalign.models.diffusion_context import DiffusionContext
from specalign.models.standalone import DiffusionDrafter

ORDERS = ("left_to_right", "blockwise", "random", "confidence")
BLOCK_STEPS = 2
"""Steps per block in the order `blockwise`."""
LONGEST_CONTEXT = 4096
"""The longest context, in its own tokens, of a drafter with another vocabulary; of a longer text it
sees the later half of that."""


class DiffusionProposer:
    """A trained standalone drafter.

    Args:
        drafter: over the target's vocabulary.
        draft_tokens: K, default its training's block.
        steps: T, at most K.
        order: a name of `ORDERS`.
        hot_start: the first of at least two steps draws from the last draft's predictions.
        tree_nodes: tokens of a tree over one step's marginals; 0 = a chain.
        siblings: above temperature 0 draw the tree's tokens; how siblings are drawn.

    Raises:
        UserError: an unknown order, a number out of range, options that exclude each other.
    """

    name = "diffusion"

    def __init__(
        self,
        drafter: DiffusionDrafter,
        draft_tokens: int | None = None,
        steps: int = 1,
        order: str = "left_to_right",
        hot_start: bool = False,
        tree_nodes: int = 0,
        siblings: Siblings | None = None,
    ) -> None:
        if order not in ORDERS:
            raise UserError(f"order={order!r} is unknown{nearest(order, ORDERS)}")
        check_range("draft_tokens", draft_tokens, 1)
        check_range("steps", steps, 1)
        check_range("tree_nodes", tree_nodes, 0)
        if hot_start and steps < 2:
            raise UserError(
                f"hot_start takes the place of one of several steps: steps={steps} must be at "
                "least 2"
            )
        if tree_nodes and steps > 1:
            raise UserError(
                f"tree_nodes={tree_nodes}: trees are made of one step's marginals, not of "
                f"steps={steps}"
            )
        self.drafter, self.steps, self.order, self.hot_start = (
            drafter.eval(),
            steps,
            order,
            hot_start,
        )
        self.draft_tokens = draft_tokens or drafter.config.block_size
        self.tree_nodes, self.siblings = tree_nodes, siblings
        self.draft_nodes = max(self.draft_tokens, tree_nodes)

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy or (self.tree_nodes and self.siblings is None):
            return "point"
        if min(self.steps, self.draft_tokens) == 1:
            return "independent"
        return "causal" if self.order == "left_to_right" else "unmasked"

    def start(self, request: Request) -> DiffusionDrafts:
        return DiffusionDrafts(self, request)


class StandaloneProposer(Drafter, Protocol):
    """A proposer that drafts with a standalone drafter."""

    drafter: DiffusionDrafter


P = TypeVar("P", bound=StandaloneProposer)


class DiffusionSession(DraftSession, Generic[P]):
    """One request's text as a standalone drafter's context: the base of several systems'
    sessions."""

    rewinds = True

    def __init__(self, proposer: P, request: Request) -> None:
        self.proposer, self.drafter, self.request = proposer, proposer.drafter, request
        self.law: Law = request.law(proposer)
        self.context = DiffusionContext(
            self.drafter, request.cache.capacity + proposer.draft_tokens
        )

    def append_masks(self, k: int) -> Tensor:
        """Bring the context up to date with the text; returns k masks (K,) to follow it."""
        follow(self.context, self.request.tokens)
        return torch.full((k,), self.drafter.mask_id, device=self.context.device)

    def find_masks(self, block_K: Tensor) -> Tensor:
        return block_K == self.drafter.mask_id

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


class DiffusionDrafts(DiffusionSession[DiffusionProposer]):
    """One request's drafts."""

    def __init__(self, proposer: DiffusionProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.last_logits_KV: Tensor | None = None  # of the last draft, for a hot start
        self.last_length = 0  # of the text before it

    def propose(self, k: int) -> Proposal:
        block_K = self.append_masks(k)
        if self.proposer.tree_nodes:
            return self._draft_tree(self.context.denoise(block_K))
        steps_K = torch.zeros_like(block_K)
        logits, q = dict[int, Tensor](), dict[int, Tensor]()  # by position
        count, rank_K, left = min(self.proposer.steps, k), self._rank_positions(k), k
        hot_RV = self._reuse_logits(k) if count > 1 else None
        for step in range(count):
            logits_RV = (
                hot_RV if step == 0 and hot_RV is not None else self.context.denoise(block_K)
            )
            end = k - left + self._count_in_block(left, count, step)
            at = self._choose_positions(
                logits_RV, block_K[:end], rank_K, ceil(left / (count - step))
            )
            places = at.tolist()
            left -= len(places)
            if self.proposer.hot_start:
                logits.update(zip(places, logits_RV[at], strict=True))
            tokens, q_RV = self.request.choose(self.law, logits_RV[at], self.before(at), places)
            block_K[at], steps_K[at] = tokens, step
            if q_RV is not None:
                q.update(zip(places, q_RV, strict=True))
        if self.proposer.hot_start:
            self.last_logits_KV, self.last_length = _stack(logits), len(self.request.tokens)
        if self.law == "point":
            return Proposal(block_K, "point")
        if self.law == "unmasked":
            return Proposal(block_K, "unmasked", DraftProbs(_stack(q)), steps_K, state_only=True)
        return Proposal(block_K, self.law, DraftProbs(_stack(q)))

    def _reuse_logits(self, k: int) -> Tensor | None:
        """The last draft's logits at those of the k positions that it reached; None = none."""
        if self.last_logits_KV is None:
            return None
        shift = len(self.request.tokens) - self.last_length
        found_RV = self.last_logits_KV[shift : shift + k]
        return found_RV if len(found_RV) else None

    def _count_in_block(self, left: int, count: int, step: int) -> int:
        """How many masked positions, from the left, this step may unmask: in the order `blockwise`
        those left of its block."""
        if self.proposer.order != "blockwise":
            return left
        size = 0
        for later in range(step, min(count, (step // BLOCK_STEPS + 1) * BLOCK_STEPS)):
            size += ceil((left - size) / (count - later))
        return size

    def _rank_positions(self, k: int) -> Tensor:
        """The unmasking order, as far as it does not depend on the network."""
        device = self.context.device
        if self.proposer.order == "random":
            return torch.randperm(k, generator=self.request.generator, device=device)
        return torch.arange(k, device=device)

    def _choose_positions(
        self, logits_RV: Tensor, block_K: Tensor, rank_K: Tensor, count: int
    ) -> Tensor:
        """The next `count` masked positions that have logits, ascending. The choice may look at q,
        never at what is drawn from it."""
        masked_R = self.find_masks(block_K[: len(logits_RV)])
        rank_R = rank_K[: len(masked_R)].float()
        if self.proposer.order in ("blockwise", "confidence"):
            rank_R = -logits_RV[: len(masked_R)].log_softmax(-1).amax(-1)
        first = rank_R.masked_fill(~masked_R, torch.inf).argsort()
        return first[:count].sort().values  # all rows of a hot start are masked

    def _draft_tree(self, logits_KV: Tensor) -> Proposal:
        sampling, nodes = self.request.sampling, self.proposer.tree_nodes
        before = self.before(torch.arange(len(logits_KV), device=logits_KV.device))
        if self.law == "point":
            # at temperature 0 rank by q at temperature 1
            scaled_KV = apply_penalties(logits_KV, sampling, before) / (sampling.temperature or 1.0)
            return tree_from_marginals(scaled_KV.log_softmax(-1), nodes)
        siblings, generator = self.proposer.siblings, self.request.generator
        assert siblings is not None
        q_KV, parents = (
            probs(logits_KV, sampling, before),
            drawn_tree_parents(nodes, len(logits_KV)),
        )
        tokens_N, q_NV = draw_tree(
            parents,
            lambda k, above: q_KV[k].expand(len(above), -1),
            siblings,
            generator,
            q_KV.device,
        )
        kind = siblings if len(set(parents)) < len(parents) else None
        return Proposal(tokens_N, self.law, DraftProbs(q_NV), parents=parents, siblings=kind)


def _stack(rows: dict[int, Tensor]) -> Tensor:
    return torch.stack([rows[k] for k in range(len(rows))])


class DiffusionWriter:
    """A standalone drafter with its own vocabulary, for `decode.proposers.translated`."""

    name = "diffusion"

    def __init__(self, drafter: DiffusionDrafter, draft_tokens: int | None = None) -> None:
        self.drafter = drafter.eval()
        self.draft_tokens = draft_tokens or drafter.config.block_size

    def start(self) -> DiffusionWriterSession:
        return DiffusionWriterSession(self)


class DiffusionWriterSession:
    """Argmax drafts of one pass after one text, in the drafter's own tokens."""

    def __init__(self, writer: DiffusionWriter) -> None:
        self.writer = writer
        self.first = 0  # where in the text the context begins
        self.context = self._new_context()

    def _new_context(self) -> DiffusionContext:
        return DiffusionContext(self.writer.drafter, LONGEST_CONTEXT + self.writer.draft_tokens)

    def propose(self, text: list[int], k: int) -> list[int]:
        """At most k tokens after the text."""
        if not text:
            return []
        if not self.first < len(text) <= self.first + LONGEST_CONTEXT:
            self.first = max(0, len(text) - LONGEST_CONTEXT // 2)
            self.context = self._new_context()
        follow(self.context, text[self.first :])
        block_K = torch.full((k,), self.writer.drafter.mask_id, device=self.context.device)
        return self.context.denoise(block_K).argmax(-1).tolist()
