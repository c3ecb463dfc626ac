"""The block drafter: one pass of its network drafts K tokens (specalign/models/block.py).

Chains: at temperature 0 the argmax tokens, law `point`. Otherwise drawn from q, the processed
distribution over the draft vocabulary: law `independent`, or `causal` with a Markov head.

Trees: the most probable paths under q, chosen rather than drawn: law `point` at every temperature.
For verifiers that test siblings the tree's tokens are drawn instead.

A drawn token is accepted with probability Σ min(p, q), a chosen one with its p: the flatter p and
q, the better the draw. SmolLM2 on MT-Bench prompts, τ of a tree of five / a chain of four: 1.68 /
1.45 at temperature 0, 1.56 / 1.55 at 0.6, 1.42 / 1.52 at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from decode.proposers.base import DraftSession, Request, check_range
from decode.proposers.controllers import TreeSize
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.sampling import (
    NOTHING,
    ProcessorState,
    Sampling,
    apply_penalties,
    probs,
    uniform,
)
from decode.speculation.tree_drafts import as_tree, draw_tree, drawn_tree_parents, rank_candidates
from specalign.common.errors import UserError
from specalign.kernels.tree import TreeHead
from specalign.lm.model import TargetOutput
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession

TREE_NODES = 5
"""Six rows with the root: one pass through the weights, at 1.1 times the cost of one row."""
TREES_UP_TO = 0.7
"""The highest temperature at which trees are the default."""


class BlockProposer:
    """A trained block drafter.

    Args:
        network: the drafter, already tied to the target.
        draft_tokens: K, default the whole block.
        tree_nodes: tokens of a tree; 0 = a chain; None = a tree of `TREE_NODES` at temperatures up
            to `TREES_UP_TO`, a chain above.
        siblings: above temperature 0 draw the tree's tokens; how siblings are drawn.
        confidence: stop a chain before the first position that is reached and accepted with a
            smaller probability than this, by the network's confidence head; at least one token is
            drafted. The head sees only the tokens before that position, so their law stays.
        by_cost: verify only the most probable nodes of a tree, as many as pay by the measured cost
            of calls, shared by all requests. They are chosen by q and by finished rounds: law
            `point`.

    Raises:
        UserError: a number out of range, options that exclude each other or that the network lacks.
    """

    name = "block"

    def __init__(
        self,
        network: BlockDrafter,
        draft_tokens: int | None = None,
        tree_nodes: int | None = 0,
        siblings: Siblings | None = None,
        confidence: float = 0.0,
        by_cost: bool = False,
    ) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("tree_nodes", tree_nodes, 0)
        if not 0 <= confidence <= 1:
            raise UserError(f"confidence={confidence:g} must be within 0..1")
        if confidence and network.confidence is None:
            raise UserError(
                f"confidence={confidence:g} needs a drafter with a confidence head: "
                "recipe=smollm2_confidence"
            )
        if confidence and tree_nodes != 0:
            raise UserError(
                f"confidence={confidence:g} stops chains; a tree of {tree_nodes} nodes is not one"
            )
        if by_cost and (tree_nodes == 0 or siblings is not None):
            raise UserError(
                "by_cost=true chooses a tree's nodes: it needs nodes above 0, and drafts that are "
                "not drawn"
            )
        most_nodes = TREE_NODES if tree_nodes is None else tree_nodes
        self.network, self.siblings, self.confidence = network.eval(), siblings, confidence
        self.tree_nodes = tree_nodes
        self.sizes = TreeSize(most_nodes) if by_cost else None
        self.draft_tokens = min(
            draft_tokens or network.config.block_size, network.config.block_size
        )
        self.draft_nodes = max(most_nodes, self.draft_tokens)
        self.by_clock = by_cost

    def nodes(self, sampling: Sampling) -> int:
        """How many tokens it drafts as a tree under these settings; 0 = a chain."""
        if self.tree_nodes is not None:
            return self.tree_nodes
        return TREE_NODES if sampling.temperature <= TREES_UP_TO else 0

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy or (self.nodes(sampling) and self.siblings is None):
            return "point"
        return "causal" if self.network.markov is not None else "independent"

    def start(self, request: Request) -> BlockDrafts:
        return BlockDrafts(self, request)


class PendingTree(NamedTuple):
    """A tree under verification: its nodes, the sum of their path probabilities, and when drafting
    began and ended, in seconds."""

    nodes: int
    expected: float
    began: float
    proposed: float


class BlockDrafts(DraftSession):
    """One request's drafts."""

    def __init__(self, proposer: BlockProposer, request: Request) -> None:
        self.proposer, self.network, self.request = proposer, proposer.network, request
        self.law: Law = request.law(proposer)
        self.session = BlockSession(self.network, request.cache, request.cache.capacity)
        self.taps = self.session.taps
        self.ids = self.network.draft_vocab
        self.pending: PendingTree | None = None

    def observe(self, output: TargetOutput, kept: int) -> None:
        pending, sizes = self.pending, self.proposer.sizes
        if pending is not None and sizes is not None:
            verify_seconds = perf_counter() - pending.proposed
            draft_seconds = pending.proposed - pending.began
            sizes.observe(pending.nodes, pending.expected, kept - 1, draft_seconds, verify_seconds)
        self.pending = None
        self.session.observe(output.hidden_BLD, output.taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        began = perf_counter()
        hidden_KD = self.session.hidden(self.request.tokens[-1])[:k]
        nodes = self.proposer.nodes(self.request.sampling)
        if not nodes:
            return self._draft_chain(hidden_KD)
        if self.law == "point":
            return self._choose_tree(hidden_KD, nodes, began)
        return self._draw_tree(hidden_KD, nodes)

    def _draft_chain(self, hidden_KD: Tensor) -> Proposal:
        found = self._draw_chain_in_c(hidden_KD)
        if found is None:
            found = self._choose_chain(hidden_KD)
        columns_K, q_KV = found
        q = None if q_KV is None else DraftProbs(q_KV, self.ids)
        return Proposal(self._tokens(columns_K), self.law, q)

    def _draw_chain_in_c(self, hidden_KD: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Draw from softmax(logits / temperature) in one call; None where that is not the whole
        q."""
        sampling = self.request.sampling
        if sampling.truncates or self.proposer.confidence or self.law == "point":
            return None
        head = self._head_in_c(len(hidden_KD))
        if head is None:
            return None
        u_K = uniform(len(hidden_KD), self.request.generator)
        return head.chain(hidden_KD, self.request.tokens[-1], sampling.temperature, u_K)

    def _head_in_c(self, levels: int) -> TreeHead | None:
        """The network's head in one call; None without one, or where a token is penalised or barred
        now: where none is, none will be at later positions."""
        head = self.network.tree
        usable = (
            head is not None and head.takes(levels) and self.request.history.ahead(0, 1) is NOTHING
        )
        return head if usable else None

    def _tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns of the draft vocabulary."""
        return columns if self.ids is None else self.ids[columns]

    def _before(self, first: int, count: int = 1) -> ProcessorState:
        """The processors' state without the drafts left of a position, which q may ignore."""
        return self.request.history.ahead(first, count).columns(self.ids)

    def _choose(self, logits_KV: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Columns (K,) for the positions from `first` on, and q where they were drawn."""
        before = self._before(first, len(logits_KV))
        ahead = range(first, first + len(logits_KV))
        return self.request.choose(self.law, logits_KV, before, ahead, self.ids)

    def _choose_chain(self, hidden_KD: Tensor) -> tuple[Tensor, Tensor | None]:
        """`_choose` position by position, with the Markov bias, as long as the confidence suffices;
        all at once where a position looks at none before it."""
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        if inputs_Kr is None and not self.proposer.confidence:
            return self._choose(logits_KV)
        columns, rows, reach = [], [], 1.0
        token = torch.tensor(self.request.tokens[-1:], device=logits_KV.device)
        for k in range(len(logits_KV)):
            if self.proposer.confidence:
                reach *= self.session.confidence(hidden_KD[k], token)
                if k and reach < self.proposer.confidence:
                    break
            column, q_1V = self._choose(self._add_bias(logits_KV, inputs_Kr, k, token), k)
            columns.append(column)
            if q_1V is not None:
                rows.append(q_1V)
            token = self._tokens(column)
        return torch.cat(columns), torch.cat(rows) if rows else None

    def _add_bias(
        self, logits_KV: Tensor, inputs_Kr: Tensor | None, k: int, tokens_P: Tensor
    ) -> Tensor:
        """Logits at position k after each of the previous tokens, (P, Vd); (1, Vd) without a Markov
        head."""
        if inputs_Kr is None:
            return logits_KV[k : k + 1]
        return logits_KV[k] + self.session.bias(inputs_Kr[k], tokens_P)

    def _choose_tree(self, hidden_KD: Tensor, nodes: int, began: float) -> Proposal:
        """The tree of the most probable paths under q; `began`: when drafting did."""
        tokens, parents, log_q = self._rank_paths(hidden_KD, nodes)
        if (sizes := self.proposer.sizes) is not None:
            paths = [math.exp(value) for value in log_q]
            count = sizes.choose(paths)
            tokens, parents = tokens[:count], parents[:count]
            self.pending = PendingTree(count, sum(paths[:count]), began, perf_counter())
        tokens_N = torch.tensor(tokens, dtype=torch.int64, device=hidden_KD.device)
        return Proposal(tokens_N, "point", parents=tuple(parents))

    def _rank_paths(
        self, hidden_KD: Tensor, nodes: int
    ) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """The most probable paths, best first: tokens, parents, ln q of each path."""
        last = self.request.tokens[-1]
        # at temperature 0 rank by q at temperature 1
        scale = self.request.sampling.temperature or 1.0
        if (head := self._head_in_c(len(hidden_KD))) is not None:
            return head(hidden_KD, last, nodes, scale)
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        width = min(nodes, logits_KV.shape[1])

        def children(k: int, above: Sequence[int | None]) -> list[tuple[list[float], list[int]]]:
            tokens = torch.tensor(
                [last if t is None else t for t in above], device=logits_KV.device
            )
            logits_PV = self._add_bias(logits_KV, inputs_Kr, k, tokens)
            logits_PV = apply_penalties(logits_PV, self.request.sampling, self._before(k))
            top = (logits_PV / scale).log_softmax(-1).topk(width, dim=-1)
            rows = list(zip(top.values.tolist(), self._tokens(top.indices).tolist(), strict=True))
            return rows if len(rows) == len(above) else rows * len(above)

        found = rank_candidates(len(logits_KV), nodes, children)
        return *as_tree(found), [node.log_q for node in found]

    def _draw_tree(self, hidden_KD: Tensor, nodes: int) -> Proposal:
        """A tree of drawn tokens; its shape does not depend on them."""
        siblings = self.proposer.siblings
        assert siblings is not None
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        parents = drawn_tree_parents(nodes, len(logits_KV))
        last = self.request.tokens[-1]

        def q_of(k: int, columns_P: Tensor) -> Tensor:
            above_P = torch.where(columns_P < 0, last, self._tokens(columns_P))
            logits_PV = self._add_bias(logits_KV, inputs_Kr, k, above_P)
            return probs(logits_PV, self.request.sampling, self._before(k)).expand(
                len(columns_P), -1
            )

        columns_N, q_NV = draw_tree(
            parents, q_of, siblings, self.request.generator, logits_KV.device
        )
        kind = siblings if len(set(parents)) < len(parents) else None
        q = DraftProbs(q_NV, self.ids)
        return Proposal(self._tokens(columns_N), self.law, q, parents=parents, siblings=kind)
