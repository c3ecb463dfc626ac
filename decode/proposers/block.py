"""The block drafter: one pass of its network drafts K tokens (specalign/models/block.py).

Chains: at temperature 0 the argmax tokens, law `point`. Otherwise drawn from q, the processed
distribution over the draft vocabulary: law `independent`, or `causal` with a Markov head. Trees:
the most probable paths under q, law `point`; or, for verifiers that test siblings, drawn.

The flatter p and q, the better the draw. SmolLM2 on MT-Bench prompts, τ of a tree of five / a chain
of four: 1.68 / 1.45 at temperature 0, 1.56 / 1.55 at 0.6, 1.42 / 1.52 at 1.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass

import torch
from torch import Tensor

from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation.proposal import DraftProbs, Law, Proposal, Siblings, point_proposal
from decode.speculation.sampling import NOTHING, ProcessorState, apply_penalties, probs, uniform
from decode.speculation.settings import Sampling
from decode.speculation.tree import cut_tree
from decode.speculation.tree_drafts import Beam, draw_tree, drawn_tree_parents, extend_beam
from specalign.common.errors import UserError
from specalign.kernels.tree import DraftHead
from specalign.lm.model import TargetOutput
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession

TREE_NODES = 5
"""Six rows with the root: one pass through the weights, at 1.1 times the cost of one row."""
TREES_UP_TO = 0.7
"""The highest temperature at which trees are the default."""


class BlockProposerSession(DraftSession):
    proposer: BlockProposer

    def __init__(self, proposer: BlockProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.network, self.ids = proposer.network, proposer.network.draft_vocab
        self.law: Law = request.law(proposer)
        self.session = BlockSession(self.network, request.cache, request.cache.capacity)
        self.taps = self.session.taps

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.session.observe(output.hidden_BLD, output.taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        hidden_KD = self.session.draft_hidden(self.request.tokens[-1])[:k]
        nodes = self.proposer.nodes(self.request.sampling)
        if not nodes:
            return self._draft_chain(hidden_KD)
        if self.law == "point":
            return self._rank_paths(hidden_KD, nodes)
        return self._draw_tree(hidden_KD, nodes)

    def _draft_chain(self, hidden_KD: Tensor) -> Proposal:
        columns_K, q_KV = self._draw_chain_in_c(hidden_KD) or self._choose_chain(hidden_KD)
        q = None if q_KV is None else DraftProbs(q_KV, self.ids)
        return Proposal(self._tokens(columns_K), self.law, q)

    def _draw_chain_in_c(self, hidden_KD: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Draw from softmax(logits / temperature) by the C kernel; None where that is not q."""
        sampling = self.request.sampling
        if sampling.truncates or self.proposer.confidence or self.law == "point":
            return None
        head = self._head_in_c(len(hidden_KD))
        if head is None:
            return None
        u_K = uniform(len(hidden_KD), self.request.generator)
        return head.chain(hidden_KD, self.request.tokens[-1], sampling.temperature, u_K)

    def _head_in_c(self, levels: int) -> DraftHead | None:
        """The network's head as a C kernel; None without one, or where a token is penalised or
        barred now: where none is, none will be at later positions."""
        head = self.network.draft_head
        if head is None or not head.takes(levels):
            return None
        return head if self.request.history.ahead(0, 1) is NOTHING else None

    def _tokens(self, columns: Tensor) -> Tensor:
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
        all at once where no position looks at those before it."""
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
        """Logits at position k after each of the previous tokens, (P, Vd)."""
        if inputs_Kr is None:
            return logits_KV[k].expand(len(tokens_P), -1)
        return logits_KV[k] + self.session.bias(inputs_Kr[k], tokens_P)

    def _rank_paths(self, hidden_KD: Tensor, nodes: int) -> Proposal:
        """The tree of the most probable paths under q, best first."""
        last = self.request.tokens[-1]
        # at temperature 0 rank by q at temperature 1
        scale = self.request.sampling.temperature or 1.0
        head = self._head_in_c(len(hidden_KD))
        if head is not None:
            tokens, parents, _ = head(hidden_KD, last, nodes, scale)
            return point_proposal(tokens, hidden_KD.device, tuple(parents))
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        width, on_cpu = min(nodes, logits_KV.shape[1]), logits_KV.device.type == "cpu"
        last_1 = torch.tensor([last]) if on_cpu else self.session.last_1
        beam: Beam | None = None
        for k in range(min(len(logits_KV), nodes)):
            above_P = last_1 if beam is None else beam.token[0]
            logits_PV = self._add_bias(logits_KV, inputs_Kr, k, above_P)
            logits_PV = apply_penalties(logits_PV, self.request.sampling, self._before(k))
            top = (logits_PV / scale).log_softmax(-1).topk(width, dim=-1)
            tokens_PW = self._tokens(top.indices)
            beam = extend_beam(beam, k, top.values[None], tokens_PW[None], nodes)
        assert beam is not None
        rows = beam.above[0].tolist()
        return Proposal(beam.token[0], "point", parents=tuple(row - 1 for row in rows))

    def _draw_tree(self, hidden_KD: Tensor, nodes: int) -> Proposal:
        siblings, generator = self.proposer.siblings, self.request.generator
        assert siblings is not None
        logits_KV, inputs_Kr = self.network.logits(hidden_KD), self.session.bias_inputs(hidden_KD)
        last = self.request.tokens[-1]

        def q_of(k: int, columns_P: Tensor) -> Tensor:
            above_P = torch.where(columns_P < 0, last, self._tokens(columns_P))
            logits_PV = self._add_bias(logits_KV, inputs_Kr, k, above_P)
            return probs(logits_PV, self.request.sampling, self._before(k))

        # near the end of an output the same tree without its deepest nodes, as in captured rounds
        parents = drawn_tree_parents(nodes, self.proposer.draft_tokens)
        _, parents = cut_tree(parents, len(logits_KV))
        return draw_tree(parents, self.law, q_of, siblings, generator, self.ids)


@dataclass(eq=False)
class BlockProposer(Proposer):
    """A trained block drafter.

    Args:
        draft_tokens: K, default the whole block.
        tree_nodes: tokens of a tree; 0 = a chain; None = a tree of `TREE_NODES` at temperatures up
            to `TREES_UP_TO`, a chain above.
        siblings: above temperature 0 draw the tree's tokens; how siblings are drawn.
        confidence: stop a chain, after its first token, before the first position that is reached
            and accepted with a smaller probability than this, by the network's confidence head. The
            head sees only the tokens before that position, so their law stays.
    """

    name = "block"
    session = BlockProposerSession
    network: BlockDrafter
    draft_tokens: InitVar[int | None] = None
    tree_nodes: int | None = 0
    siblings: Siblings | None = None
    confidence: float = 0.0

    def __post_init__(self, draft_tokens: int | None) -> None:
        if self.confidence and (self.network.confidence is None or self.tree_nodes != 0):
            needed = "tree_nodes=0 and a confidence head (recipe=smollm2_confidence)"
            raise UserError(f"confidence={self.confidence:g} needs {needed}")
        block = self.network.eval().config.block_size
        self.draft_tokens = min(draft_tokens or block, block)
        most_nodes = TREE_NODES if self.tree_nodes is None else self.tree_nodes
        self.draft_nodes = max(most_nodes, self.draft_tokens)

    def nodes(self, sampling: Sampling) -> int:
        """How many tokens it drafts as a tree under these settings; 0 = a chain."""
        if self.tree_nodes is not None:
            return self.tree_nodes
        return TREE_NODES if sampling.temperature <= TREES_UP_TO else 0

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy or (self.nodes(sampling) and self.siblings is None):
            return "point"
        return "causal" if self.network.markov is not None else "independent"
