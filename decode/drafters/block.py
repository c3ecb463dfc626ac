"""The block drafter at work: one pass of its network drafts K tokens (align/drafters/block.py).

As a chain: at temperature 0 its argmax tokens, law `point`. Otherwise it draws from q, the processed distribution
over its draft vocabulary: law `independent`, or `causal` where a Markov head looks at the token drafted before.

As a tree: the paths that q holds most probable, as many tokens as one call verifies at little more than the price of
one. Chosen and not drawn, so law `point` at every temperature.

What is drawn is accepted with Σ min(p, q) at each position, what is chosen with the p of the nodes chosen: the flatter p
and q, the better the draw. SmolLM2 on MT-Bench prompts, τ of a tree of five / a chain of four: temperature 0
1.68 / 1.45, 0.6 1.56 / 1.55, 1 1.42 / 1.52.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from align.drafters.block import BlockDrafter, BlockSession
from align.target import TargetOutput
from decode.drafters.base import Request
from decode.proposal import DenseQ, Law, Proposal, SparseQ
from decode.sampling import Sampling, best, couple, draw, penalised, probs

TREE_NODES = 5
"""With the root six rows a call: one pass through the weights (align/rows.c), at 1.1 times the price of one row."""
TREES_UP_TO = 0.7
"""The highest temperature at which trees are the default."""
EXPANDED = 4
"""Most nodes of one level whose children are looked at: the Markov bias costs a product for each."""


class BlockProposer:
    """A trained block drafter as the engine sees it.

    Args:
        network: the drafter, already tied to the target.
        draft_tokens: draft fewer than its whole block.
        tree_nodes: how many tokens to draft as a tree; 0 = a chain; None = a tree of `TREE_NODES` at temperatures up to
            `TREES_UP_TO`, a chain above.
    """

    name = "block"

    def __init__(
        self, network: BlockDrafter, draft_tokens: int | None = None, tree_nodes: int | None = 0
    ) -> None:
        self.network = network.eval()
        self.draft_tokens = min(draft_tokens or network.config.block_size, network.config.block_size)
        self.tree_nodes = tree_nodes
        self.draft_nodes = max(TREE_NODES if tree_nodes is None else tree_nodes, self.draft_tokens)

    def nodes(self, sampling: Sampling) -> int:
        """How many tokens it drafts as a tree under these settings; 0 = a chain."""
        if self.tree_nodes is not None:
            return self.tree_nodes
        return TREE_NODES if sampling.temperature <= TREES_UP_TO else 0

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy or self.nodes(sampling):
            return "point"
        return "causal" if self.network.markov is not None else "independent"

    def start(self, request: Request) -> BlockDrafts:
        return BlockDrafts(self.network, request, self.law(request.sampling), self.nodes(request.sampling))


class Candidate(NamedTuple):
    """A node that the tree may take: ln q of the path down to it, its level from 1, its token, the candidate above
    it (None = the root)."""

    log_q: float
    level: int
    token: int
    above: Candidate | None


class BlockDrafts:
    """One request's drafts."""

    def __init__(self, network: BlockDrafter, request: Request, law: Law, tree_nodes: int = 0) -> None:
        self.network, self.request, self.tree_nodes = network, request, tree_nodes
        self.law: Law = (
            law if request.noise is None else "point"
        )  # made with the noise that the target will use
        self.session = BlockSession(network, request.cache, request.cache.capacity)
        self.taps = self.session.taps

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.session.observe(output.hidden_BLD, output.taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        hidden_KD = self.session.hidden(self.request.tokens[-1])[:k]
        logits_KV = self.network.logits(hidden_KD)
        if self.tree_nodes:
            return self._grow(hidden_KD, logits_KV)
        if self.network.markov is None:
            columns_K, probs_KV = self._choose(logits_KV)
        else:
            columns_K, probs_KV = self._choose_in_turn(hidden_KD, logits_KV)
        tokens_K = columns_K if self._ids is None else self._ids[columns_K]
        if self.law == "point":
            return Proposal(tokens_K, "point")
        assert probs_KV is not None
        q = DenseQ(probs_KV) if self._ids is None else SparseQ(self._ids, probs_KV)
        return Proposal(tokens_K, self.law, q)

    @property
    def _ids(self) -> Tensor | None:
        return self.network.draft_vocab

    def _seen(self) -> Tensor | None:
        seen = self.request.seen_V
        return seen[self._ids] if seen is not None and self._ids is not None else seen

    def _choose(self, logits: Tensor, first: int = 0) -> tuple[Tensor, Tensor | None]:
        """Columns of the draft vocabulary for the positions from `first` on, (K, Vd) → (K,), and the probabilities that
        they were drawn from."""
        sampling, seen = self.request.sampling, self._seen()
        noise = self.request.noise
        if noise is not None:
            start = len(self.request.tokens) + first
            q = probs(logits, sampling, seen, overwrite=True)
            columns: Any = slice(None) if self._ids is None else self._ids
            return couple(q, lambda position: noise(position)[columns], range(start, start + len(q))), None
        if self.law == "point":
            return best(logits, sampling, seen, overwrite=True), None
        q = probs(logits, sampling, seen, overwrite=True)
        return draw(q, self.request.generator), q

    def _choose_in_turn(self, hidden_KD: Tensor, logits_KV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same with the Markov bias of the token before: one position after the other."""
        columns, rows = [], []
        token = torch.tensor(self.request.tokens[-1:], device=logits_KV.device)
        inputs_Kr = self.session.bias_inputs(hidden_KD)
        assert inputs_Kr is not None
        for k, (input_r, logits_V) in enumerate(zip(inputs_Kr, logits_KV, strict=True)):
            column, q = self._choose(logits_V + self.session.bias(input_r, token), k)
            columns.append(column)
            if q is not None:
                rows.append(q)
            token = column if self._ids is None else self._ids[column]
        return torch.cat(columns), torch.cat(rows) if rows else None

    def _grow(self, hidden_KD: Tensor, logits_KV: Tensor) -> Proposal:
        """The `tree_nodes` nodes whose paths q holds most probable, level by level. A path is never more probable
        than its beginning, so they hang together; a node can't be among them below the least probable of so many."""
        inputs_Kr = self.session.bias_inputs(hidden_KD)
        found: list[Candidate] = []
        level: Sequence[Candidate | None] = [None]
        for k, logits_V in enumerate(logits_KV):
            found += self._children(level, k, logits_V, None if inputs_Kr is None else inputs_Kr[k])
            found.sort(key=lambda c: (-c.log_q, c.level))
            del found[self.tree_nodes :]
            level = [c for c in found if c.level == k + 1][:EXPANDED]
            if not level:
                break
        place = {id(c): i for i, c in enumerate(found)}
        parents = tuple(-1 if c.above is None else place[id(c.above)] for c in found)
        tokens = torch.tensor([c.token for c in found], dtype=torch.int64, device=logits_KV.device)
        return Proposal(tokens, "point", parents=parents)

    def _children(
        self, level: Sequence[Candidate | None], k: int, logits_V: Tensor, input_r: Tensor | None
    ) -> list[Candidate]:
        """The most probable tokens at position k after each node of a level."""
        logits_EV = logits_V[None]
        if input_r is not None:
            last = self.request.tokens[-1]
            before = [last if node is None else node.token for node in level]
            logits_EV = logits_EV + self.session.bias(input_r, torch.tensor(before, device=logits_V.device))
        logits_EV = penalised(logits_EV, self.request.sampling, self._seen())
        # at temperature 0 it is how sure q is that counts
        scale = self.request.sampling.temperature or 1.0
        log_q = (logits_EV / scale).log_softmax(-1).topk(min(self.tree_nodes, logits_EV.shape[-1]), dim=-1)
        columns = log_q.indices if self._ids is None else self._ids[log_q.indices]
        rows = zip(log_q.values.tolist(), columns.tolist(), strict=True)
        shared = list(rows) if len(logits_EV) == len(level) else list(rows) * len(level)
        return [
            Candidate((0.0 if node is None else node.log_q) + value, k + 1, token, node)
            for node, (values, tokens) in zip(level, shared, strict=True)
            for value, token in zip(values, tokens, strict=True)
        ]
