"""The block drafter at work: one pass of its network drafts K tokens (align/models/block.py).

Chains: at temperature 0 the argmax tokens, law `point`. Otherwise drawn from q, the processed distribution over the draft
vocabulary: law `independent`, or `causal` where a Markov head looks at the token drafted before.

Trees: the most probable paths under q, as many tokens as one call verifies at little more than the price of one. They are
chosen, not drawn: law `point` at every temperature. For verifiers that test siblings a tree is drawn instead.

A drawn token is accepted with probability Σ min(p, q), a chosen one with its p: the flatter p and q, the better the draw.
SmolLM2 on MT-Bench prompts, τ of a tree of five / a chain of four: 1.68 / 1.45 at temperature 0, 1.56 / 1.55 at 0.6, 1.42 / 1.52
at 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from align.common.errors import UserError
from align.kernels.tree import TreeHead
from align.models.block import BlockDrafter
from align.models.block_session import BlockSession
from align.target.model import TargetOutput
from decode.drafters.base import DraftSession, Request, check_range
from decode.drafters.controllers import TreeSize
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings
from decode.speculation.sampling import NOTHING, ProcessorState, Sampling, apply_penalties, probs, uniform
from decode.speculation.tree_drafts import as_tree, draw_tree, drawn_tree_parents, rank_candidates

TREE_NODES = 5
"""With the root six rows a call: one pass through the weights (align/kernels/rows.c), at 1.1 times the price of one row."""
MOST_PASSES = 8
TREES_UP_TO = 0.7
"""The highest temperature at which trees are the default."""


class BlockProposer:
    """A trained block drafter.

    Args:
        network: the drafter, already tied to the target.
        draft_tokens: K, default the whole block.
        tree_nodes: how many tokens to draft as a tree; 0 = a chain; None = a tree of `TREE_NODES` at temperatures up to
            `TREES_UP_TO`, a chain above.
        siblings: above temperature 0 draw the tree's tokens instead of choosing them; how siblings are drawn.
        confidence: stop a chain before the first position that is reached and accepted with a smaller probability than this,
            0..1, by the network's confidence head; at least one token is drafted. The head sees only the tokens before that
            position, so their law stays.

        passes: over a block; every one after the first sees the estimates of the one before. None = as trained: two with
            self-conditioning, else one. Estimates are functions of the context, so q is what it is with one pass: exact.

        by_cost: verify only those nodes of a tree, the most probable first, that pay by the measured cost of calls, shared by all
            requests. They are chosen by q and by finished rounds: any choice of nodes is a tree of law `point`.

    Raises:
        UserError: a choice by cost without a tree, or of drawn tokens; a confidence without such a head, or with a tree; passes without self-conditioning.
    """

    name = "block"

    def __init__(
        self,
        network: BlockDrafter,
        draft_tokens: int | None = None,
        tree_nodes: int | None = 0,
        siblings: Siblings | None = None,
        confidence: float = 0.0,
        passes: int | None = None,
        by_cost: bool = False,
    ) -> None:
        check_range("draft_tokens", draft_tokens, 1)
        check_range("tree_nodes", tree_nodes, 0)
        check_range("passes", passes, 1, MOST_PASSES)
        if (passes or 1) > 1 and network.estimate is None:
            raise UserError(
                f"passes={passes} needs a drafter that was trained with drafter.self_conditioning=true"
            )
        if not 0 <= confidence <= 1:
            raise UserError(f"confidence={confidence:g} must be within 0..1")
        if confidence and network.confidence is None:
            raise UserError(
                f"confidence={confidence:g} needs a drafter with a confidence head: recipe=smollm2_confidence"
            )
        if confidence and tree_nodes != 0:
            raise UserError(
                f"confidence={confidence:g} stops chains; a tree of {tree_nodes} nodes is not one"
            )
        self.network, self.siblings, self.confidence = network.eval(), siblings, confidence
        self.draft_tokens = min(draft_tokens or network.config.block_size, network.config.block_size)
        if by_cost and (tree_nodes == 0 or siblings is not None):
            raise UserError(
                "by_cost=true chooses a tree's nodes: it needs nodes above 0, and drafts that are not drawn"
            )
        self.passes, self.tree_nodes = passes, tree_nodes
        self.sizes = TreeSize(TREE_NODES if tree_nodes is None else tree_nodes) if by_cost else None
        self.draft_nodes = max(TREE_NODES if tree_nodes is None else tree_nodes, self.draft_tokens)
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


class Round(NamedTuple):
    """A tree under verification: its nodes, the sum of their path probabilities, when its drafting began and ended (seconds)."""

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
        self.trained_passes = self.session.passes
        self.round: Round | None = None

    def observe(self, output: TargetOutput, kept: int) -> None:
        if self.round is not None:
            nodes, expected, began, proposed = self.round
            times = proposed - began, perf_counter() - proposed
            if self.proposer.sizes is not None:
                self.proposer.sizes.observe(nodes, expected, kept - 1, *times)
            self.round = None
        self.session.observe(output.hidden_BLD, output.taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        began = perf_counter()
        self.session.passes = self.proposer.passes or self.trained_passes
        hidden_KD = self.session.hidden(self.request.tokens[-1])[:k]
        nodes = self.proposer.nodes(self.request.sampling)
        if nodes and self.law == "point":
            return self._best_first_tree(hidden_KD, nodes, began)
        if not nodes and (drawn := self._drawn_chain(hidden_KD)) is not None:
            return drawn
        logits_KV = self.network.logits(hidden_KD)
        if nodes:
            return self._drawn_tree(hidden_KD, logits_KV, nodes)
        if self.network.markov is None and not self.proposer.confidence:
            columns_K, probs_KV = self._choose(logits_KV)
        else:
            columns_K, probs_KV = self._choose_in_turn(hidden_KD, logits_KV)
        if self.law == "point":
            return Proposal(self._tokens(columns_K), "point")
        assert probs_KV is not None
        return Proposal(self._tokens(columns_K), self.law, DraftProbs(probs_KV, self._ids))

    def _drawn_chain(self, hidden_KD: Tensor) -> Proposal | None:
        """A chain drawn from softmax(logits / temperature) in one call; None where more is asked for than that."""
        sampling = self.request.sampling
        plain = not (sampling.truncates or self.proposer.confidence or self.law == "point")
        head = self._head_in_c(len(hidden_KD)) if plain else None
        if head is None:
            return None
        u_K = uniform(len(hidden_KD), self.request.generator)
        columns_K, q_KV = head.chain(hidden_KD, self.request.tokens[-1], sampling.temperature, u_K)
        return Proposal(self._tokens(columns_K), self.law, DraftProbs(q_KV, self._ids))

    def _head_in_c(self, levels: int) -> TreeHead | None:
        """The network's head in one call for so many levels; None where it has none, or where a token is penalised or barred now: where
        nothing is, nothing will be further on."""
        head = self.network.tree
        fits = head is not None and head.takes(levels) and self.request.history.ahead(0, 1) is NOTHING
        return head if fits else None

    @property
    def _ids(self) -> Tensor | None:
        return self.network.draft_vocab

    def _tokens(self, columns: Tensor) -> Tensor:
        """The tokens of columns of the draft vocabulary."""
        return columns if self._ids is None else self._ids[columns]

    def _before(self, first: int, count: int = 1) -> ProcessorState:
        """The processors' state without the drafts left of a position: q may ignore them, as long as tokens are drawn from it."""
        return self.request.history.ahead(first, count).columns(self._ids)

    def _choose(self, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Columns of the draft vocabulary for the positions from `first` on, (K, Vd) → (K,), and the probabilities that
        they were drawn from."""
        before, ahead = self._before(first, len(logits)), range(first, first + len(logits))
        return self.request.choose(self.law, logits, before, ahead, self._ids)

    def _choose_in_turn(self, hidden_KD: Tensor, logits_KV: Tensor) -> tuple[Tensor, Tensor | None]:
        """As `_choose`, one position after the other: with the Markov bias of the token before, while the confidence suffices."""
        columns, rows, reach = [], [], 1.0
        token = torch.tensor(self.request.tokens[-1:], device=logits_KV.device)
        inputs_Kr = self.session.bias_inputs(hidden_KD)
        for k in range(len(logits_KV)):
            if self.proposer.confidence:
                reach *= self.session.confidence(hidden_KD[k], token)
                if k and reach < self.proposer.confidence:
                    break
            column, q = self._choose(self._after(logits_KV, inputs_Kr, k, token), k)
            columns.append(column)
            if q is not None:
                rows.append(q)
            token = self._tokens(column)
        return torch.cat(columns), torch.cat(rows) if rows else None

    def _best_first_tree(self, hidden_KD: Tensor, nodes: int, began: float) -> Proposal:
        """The tree of the most probable paths under q; `began`: when its drafting did."""
        tokens, parents, log_q = self._paths(hidden_KD, nodes)
        if (sizes := self.proposer.sizes) is not None:
            paths = [math.exp(value) for value in log_q]
            count = sizes.choose(paths)
            tokens, parents = tokens[:count], parents[:count]
            self.round = Round(count, sum(paths[:count]), began, perf_counter())
        at = torch.tensor(tokens, dtype=torch.int64, device=hidden_KD.device)
        return Proposal(at, "point", parents=tuple(parents))

    def _paths(self, hidden_KD: Tensor, nodes: int) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """The nodes of the most probable paths: tokens, parents, ln q of each path, the most probable first."""
        last = self.request.tokens[-1]
        # at temperature 0 rank by q at temperature 1
        scale = self.request.sampling.temperature or 1.0
        if (head := self._head_in_c(len(hidden_KD))) is not None:
            return head(hidden_KD, last, nodes, scale)
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        most = min(nodes, logits_KV.shape[1])

        def children(k: int, above: Sequence[int | None]) -> list[tuple[list[float], list[int]]]:
            tokens = torch.tensor([last if t is None else t for t in above], device=logits_KV.device)
            logits_EV = self._after(logits_KV, inputs_Kr, k, tokens)
            logits_EV = apply_penalties(logits_EV, self.request.sampling, self._before(k))
            top = (logits_EV / scale).log_softmax(-1).topk(most, dim=-1)
            rows = list(zip(top.values.tolist(), self._tokens(top.indices).tolist(), strict=True))
            return rows if len(rows) == len(above) else rows * len(above)

        found = rank_candidates(len(logits_KV), nodes, children)
        return *as_tree(found), [node.log_q for node in found]

    def _after(self, logits_KV: Tensor, inputs_Kr: Tensor | None, k: int, tokens_P: Tensor) -> Tensor:
        """Logits at position k after each of the tokens before it, (P, Vd); (1, Vd) without a Markov head."""
        if inputs_Kr is None:
            return logits_KV[k : k + 1]
        return logits_KV[k] + self.session.bias(inputs_Kr[k], tokens_P)

    def _drawn_tree(self, hidden_KD: Tensor, logits_KV: Tensor, nodes: int) -> Proposal:
        """A tree of drawn tokens; its shape does not depend on them."""
        siblings = self.proposer.siblings
        assert siblings is not None
        inputs_Kr, parents = self.session.bias_inputs(hidden_KD), drawn_tree_parents(nodes, len(logits_KV))
        last = self.request.tokens[-1]

        def q_of(k: int, columns_P: Tensor) -> Tensor:
            above_P = torch.where(columns_P < 0, last, self._tokens(columns_P))
            logits_PV = self._after(logits_KV, inputs_Kr, k, above_P)
            return probs(logits_PV, self.request.sampling, self._before(k)).expand(len(columns_P), -1)

        columns_N, probs_NV = draw_tree(parents, q_of, siblings, self.request.generator, logits_KV.device)
        branches = len(set(parents)) < len(parents)
        return Proposal(
            self._tokens(columns_N),
            self.law,
            DraftProbs(probs_NV, self._ids),
            parents=parents,
            siblings=siblings if branches else None,
        )
