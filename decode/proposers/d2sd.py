"""D²SD (arXiv 2606.04446): two block drafters; the second drafts again from where the first is
probably wrong.

Boundary i assumes that the first i tokens of the first draft are right and the next one is wrong;
by the first drafter's confidences c_k = max_v q_k(v) that has the probability r(i) = (Π_{k≤i}
c_k)·(1 − c_{i+1}). After each of the most probable boundaries the second drafts again, given the
tokens before it, all in one pass. It is trained with `objective.prefix_decay`.

All drafts form one tree. At temperature 0 tokens are chosen and drafts are merged where they share
a prefix: law `point`. Otherwise every token is drawn from its q, law `causal`; the second drafter's
first token is an independent sibling, with another q, of the first draft's token there. Boundaries
are then scored without the Markov bias, that is before any token is drawn, so that the tree's shape
does not depend on its tokens. (Chosen drafts are accepted less often: τ on SmolLM2 drawn and
chosen: 1.63 and 1.30 at temperature 1, 1.71 and 1.55 at 0.6.)
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.proposers.base import DraftSession, Proposer, Request
from decode.speculation.proposal import DraftProbs, Law, Proposal
from decode.speculation.sampling import NOTHING, apply_penalties, draw, probs
from decode.speculation.settings import MOST_NODES, Sampling
from decode.speculation.tree import chain
from decode.speculation.tree_drafts import concatenate_q, prefix_tree
from specalign.common.errors import UserError
from specalign.lm.model import TargetOutput
from specalign.models.block import BlockDrafter
from specalign.models.block_session import BlockSession


class WrittenTokens(NamedTuple):
    """For every token that was filled in: the penalised logits (R, Vd), without the Markov bias for
    drawn tokens; the distribution it was drawn from, None if it was chosen; its block and
    position."""

    logits_RV: Tensor
    q: DraftProbs | None
    rows: list[tuple[int, int]]


class D2SDSession(DraftSession):
    """Both networks share the target's cache and tapped layers."""

    proposer: D2SDProposer

    def __init__(self, proposer: D2SDProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.law: Law = request.law(proposer)
        self.first, self.second = self.sessions = [
            BlockSession(network, request.cache, request.cache.capacity)
            for network in (proposer.first, proposer.second)
        ]
        self.taps = tuple(sorted({i for session in self.sessions for i in session.taps}))

    def observe(self, output: TargetOutput, kept: int) -> None:
        for session in self.sessions:
            taps_BLFD = output.taps_BLFD
            if taps_BLFD is not None and session.taps != self.taps:
                taps_BLFD = taps_BLFD[:, :, [self.taps.index(i) for i in session.taps]]
            session.observe(output.hidden_BLD, taps_BLFD, kept)

    def propose(self, k: int) -> Proposal:
        k = min(k, self.proposer.draft_tokens)
        row = [[self.request.tokens[-1]] + [0] * k]
        draft_1J = torch.tensor(row, device=self.request.target.device)
        written = self._write(self.first, draft_1J, [0])
        # at temperature 0 rank by q at temperature 1
        scale = self.request.sampling.temperature or 1.0
        confidence_K = (written.logits_RV / scale).softmax(-1).amax(-1)
        scores_K = boundary_scores(confidence_K)
        boundaries = rank_boundaries(scores_K, self.proposer.boundaries)
        branches_NJ = draft_1J.repeat(len(boundaries), 1)
        rewritten = self._write(self.second, branches_NJ, boundaries)
        if self.law == "point":
            drafts = torch.cat((draft_1J, branches_NJ))[:, 1:].tolist()
            return prefix_tree(drafts, draft_1J.device)
        # the first draft, then each branch from its boundary on; equal tokens stay separate nodes
        parents, tokens, order = list(chain(k)), [draft_1J[0, 1:]], []
        for n, i in enumerate(boundaries):
            parents += [i - 1, *range(len(parents), len(parents) + k - i - 1)]
            order += [rewritten.rows.index((n, position)) for position in range(i, k)]
            tokens.append(branches_NJ[n, 1 + i :])
        assert written.q is not None and rewritten.q is not None
        qs = (written.q, rewritten.q.take(torch.tensor(order)))
        q = concatenate_q(qs, self.request.target.vocab_size)
        return Proposal(
            torch.cat(tokens), self.law, q, parents=tuple(parents), siblings="independent"
        )

    def _write(self, session: BlockSession, blocks_NJ: Tensor, shown: list[int]) -> WrittenTokens:
        """Fill blocks of the last token and J−1 drafts, in place, position by position, after the
        first `shown` drafts of each."""
        network, sampling, ids = session.drafter, self.request.sampling, session.drafter.draft_vocab
        size, count = network.config.rows, blocks_NJ.shape[1] - 1
        # positions not drafted yet are masked, and the last draft is no input of the layout
        # anchor_first
        blocks_NR = F.pad(blocks_NJ, (0, size))[:, :size]
        shown_N = torch.tensor(shown, device=blocks_NJ.device)
        hidden_NKD = session.draft_hidden_of_blocks(network.mask_blocks(blocks_NR, shown_N))
        open_blocks = {
            k: [n for n, i in enumerate(shown) if i <= k] for k in range(min(shown), count)
        }
        hidden_RD = torch.cat([hidden_NKD[blocks, k] for k, blocks in open_blocks.items()])
        widths = [len(blocks) for blocks in open_blocks.values()]
        logits_RV, inputs_Rr = network.logits(hidden_RD), session.bias_inputs(hidden_RD)
        inputs = [None] * len(widths) if inputs_Rr is None else inputs_Rr.split(widths)
        scored, qs = [], []
        for (k, blocks), logits, line in zip(
            open_blocks.items(), logits_RV.split(widths), inputs, strict=True
        ):
            before = self.request.history.ahead(k, 1).columns(ids)
            biased = logits if line is None else logits + session.bias(line, blocks_NJ[blocks, k])
            if self.law == "point":
                scored.append(apply_penalties(biased, sampling, before))
                columns, _ = self.request.choose(
                    "point", scored[-1].clone(), NOTHING, [k] * len(blocks), ids
                )
            else:
                scored.append(apply_penalties(logits, sampling, before))
                qs.append(probs(biased, sampling, before))
                columns = draw(qs[-1], self.request.generator)
            blocks_NJ[blocks, k + 1] = columns if ids is None else ids[columns]
        q = DraftProbs(torch.cat(qs), ids) if qs else None
        rows = [(n, k) for k, blocks in open_blocks.items() for n in blocks]
        return WrittenTokens(torch.cat(scored), q, rows)


@dataclass(eq=False)
class D2SDProposer(Proposer):
    """Two trained block drafters of one target.

    Args:
        second: drafts again after the boundaries.
        boundaries: how many of them, at most all.
        draft_tokens: K, default the shorter one's block.
    """

    name = "d2sd"
    session = D2SDSession
    first: BlockDrafter
    second: BlockDrafter
    boundaries: int = 4
    draft_tokens: InitVar[int | None] = None

    def __post_init__(self, draft_tokens: int | None) -> None:
        block = min(one.eval().config.block_size for one in (self.first, self.second))
        self.draft_tokens = min(draft_tokens or block, block)
        # the branch after boundary i shares its first i tokens with the first draft
        branches = range(self.draft_tokens, 0, -1)
        self.draft_nodes = self.draft_tokens + sum(branches[: self.boundaries])
        if self.draft_nodes > MOST_NODES:
            size = f"a tree of {self.draft_nodes} nodes (limit {MOST_NODES})"
            given = f"boundaries={self.boundaries} with draft_tokens={self.draft_tokens}"
            raise UserError(f"{given} gives {size}")

    def law(self, sampling: Sampling) -> Law:
        return "point" if sampling.greedy else "causal"


def boundary_scores(confidence_K: Tensor) -> Tensor:
    """r(i) of the boundaries i = 0..K−1, (K,), from the confidences c_1..c_K."""
    reached_K = torch.cat((torch.ones_like(confidence_K[:1]), confidence_K[:-1].cumprod(0)))
    return reached_K * (1 - confidence_K)


def rank_boundaries(scores_K: Tensor, count: int) -> list[int]:
    """The `count` boundaries with the highest scores, ascending."""
    return sorted(scores_K.argsort(descending=True, stable=True)[:count].tolist())
