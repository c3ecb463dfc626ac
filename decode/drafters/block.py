"""The block drafter at work: one pass of its network drafts K tokens (align/drafters/block.py).

At temperature 0 it proposes its argmax tokens, law `point`. Otherwise it draws from q, the processed
distribution over its draft vocabulary: law `independent`, or `causal` where a Markov head looks at the token
drafted before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from align.drafters.block import BlockDrafter, BlockSession
from align.target import TargetOutput
from decode.drafters.base import Request
from decode.proposal import DenseQ, Law, Proposal, SparseQ
from decode.sampling import Sampling, best, draw, probs


class BlockProposer:
    """A trained block drafter as the engine sees it.

    Args:
        network: the drafter, already tied to the target.
        draft_tokens: draft fewer than its whole block.
    """

    name = "block"

    def __init__(self, network: BlockDrafter, draft_tokens: int | None = None) -> None:
        self.network = network.eval()
        self.draft_tokens = min(draft_tokens or network.config.block_size, network.config.block_size)

    def law(self, sampling: Sampling) -> Law:
        if sampling.greedy:
            return "point"
        return "causal" if self.network.markov is not None else "independent"

    def start(self, request: Request) -> BlockDrafts:
        return BlockDrafts(self.network, request, self.law(request.sampling))


class BlockDrafts:
    """One request's drafts."""

    def __init__(self, network: BlockDrafter, request: Request, law: Law) -> None:
        self.network, self.request, self.law = network, request, law
        self.session = BlockSession(network, request.cache, request.cache.capacity)
        self.taps = self.session.taps

    def observe(self, output: TargetOutput, kept: int) -> None:
        self.session.observe(output.hidden_BLD, output.taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        hidden_KD = self.session.hidden(self.request.tokens[-1])[:k]
        logits_KV = self.network.logits(hidden_KD)
        greedy = self.law == "point"
        if self.network.markov is None:
            columns_K, probs_KV = self._choose(logits_KV)
        else:
            columns_K, probs_KV = self._choose_in_turn(hidden_KD, logits_KV)
        tokens_K = columns_K if self._ids is None else self._ids[columns_K]
        if greedy:
            return Proposal(tokens_K, "point")
        assert probs_KV is not None
        q = DenseQ(probs_KV) if self._ids is None else SparseQ(self._ids, probs_KV)
        return Proposal(tokens_K, self.law, q)

    @property
    def _ids(self) -> Tensor | None:
        return self.network.draft_vocab

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Columns of the draft vocabulary, (K, Vd) → (K,), and the probabilities that they were drawn
        from."""
        sampling, seen = self.request.sampling, self.request.seen_V
        if seen is not None and self._ids is not None:
            seen = seen[self._ids]
        if sampling.greedy:
            return best(logits, sampling, seen, overwrite=True), None
        q = probs(logits, sampling, seen, overwrite=True)
        return draw(q, self.request.generator), q

    def _choose_in_turn(self, hidden_KD: Tensor, logits_KV: Tensor) -> tuple[Tensor, Tensor | None]:
        """The same with the Markov bias of the token before: one position after the other."""
        columns, rows = [], []
        token = self.request.tokens[-1]
        ids = self._ids
        inputs_Kr = self.session.bias_inputs(hidden_KD)
        assert inputs_Kr is not None
        for input_r, logits_V in zip(inputs_Kr, logits_KV, strict=True):
            column, q = self._choose((logits_V + self.session.bias(input_r, token))[None])
            columns.append(column)
            if q is not None:
                rows.append(q)
            token = int(column if ids is None else ids[column])
        return torch.cat(columns), torch.cat(rows) if rows else None
