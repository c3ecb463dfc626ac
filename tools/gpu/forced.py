"""Drafts of a chosen quality: a block drafter runs in full, and its tokens are replaced by the
target's own text, each one spoilt with a fixed chance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from unittest import mock

import torch
from torch import Tensor

from decode.captured import engine
from decode.captured.block import BestPaths, BlockChain, BlockDrafting
from decode.captured.drafting import Draft, Drafting, Unsupported, fixed_shape, room_of
from decode.captured.engine import CapturedEngine, RowsKey
from decode.captured.rows import Rows
from decode.captured.state import RowState
from decode.engine.request import RequestRunner
from decode.proposers.base import Request
from decode.proposers.block import BlockProposer, BlockProposerSession
from decode.speculation.proposal import Proposal
from decode.speculation.settings import Sampling
from decode.speculation.tree import chain, node_depths
from specalign.models.block import BlockDrafter


def expected_tau(acceptance: float, draft_tokens: int) -> float:
    """τ of chains whose tokens are accepted with this chance each."""
    return sum(acceptance**i for i in range(draft_tokens + 1))


def find_acceptance(tau: float, draft_tokens: int) -> float:
    """The chance of acceptance that gives this τ, from 1 to K + 1."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if expected_tau(middle, draft_tokens) < tau:
            low = middle
        else:
            high = middle
    return low


def tree_shape(nodes: int, depth: int) -> tuple[int, ...]:
    """Parents: a chain, and what is left over from it next to its first node."""
    return chain(min(nodes, depth)) + (-1,) * max(nodes - depth, 0)


class KnownTexts:
    """Prompts and their greedy continuations, and drafts made of them.

    outputs: by prompt. drafts: prompt and continuation, (T,), with some tokens of the latter
    replaced by the next ones.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.outputs: dict[tuple[int, ...], list[int]] = {}
        self.drafts: dict[tuple[int, ...], Tensor] = {}

    def spoil(self, tau: float, draft_tokens: int, device: torch.device) -> None:
        """Make the drafts for this τ: right ones are as many as its chance of acceptance says, and
        lie anywhere."""
        acceptance = find_acceptance(tau, draft_tokens)
        generator = torch.Generator().manual_seed(0)
        for prompt, output in self.outputs.items():
            size = len(output) + draft_tokens  # drafts may reach behind the end
            wrong_T = torch.zeros(len(prompt) + size, dtype=torch.int64)
            wrong_T[len(prompt) :] = torch.randperm(size, generator=generator) >= acceptance * size
            text_T = torch.tensor([*prompt, *output, *[0] * draft_tokens])
            self.drafts[prompt] = ((text_T + wrong_T) % self.vocab_size).to(device)


@lru_cache
def make_wrong(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """What is added to the tokens of a tree, (N,): 0 on the chain, and 1, 2, … for the siblings of its
    first node, which are thereby wrong, whether or not that one is spoilt."""
    first = [i for i, parent in enumerate(parents) if parent < 0]
    wrong = [first.index(i) if i in first else 0 for i in range(len(parents))]
    return torch.tensor(wrong, device=device)


class Forced(BlockDrafting):
    """Mixed into a captured block drafter."""

    texts: KnownTexts

    def allocate(self, state: RowState) -> None:
        super().allocate(state)
        self.parents = tree_shape(self.nodes, self.depth)
        self.drafts_BT = torch.zeros_like(state.text_BS)

    def start(self, row: int, tokens: list[int]) -> None:
        super().start(row, tokens)
        drafts_T = self.texts.drafts[tuple(tokens[:-1])]
        self.drafts_BT[row, : len(drafts_T)] = drafts_T

    def draft(self, state: RowState, end: int) -> Draft:
        draft = super().draft(state, end)
        above_BN, depth_BN = fixed_shape(self.parents, room_of(state, self.depth))
        at_BN = state.counter("length")[:, None] + node_depths(self.parents, depth_BN.device)
        tokens_BN = self.drafts_BT.gather(1, at_BN.clamp(max=self.drafts_BT.shape[1] - 1))
        wrong_N = make_wrong(self.parents, tokens_BN.device)
        tokens_BN = (tokens_BN + wrong_N) % self.texts.vocab_size
        return draft._replace(tokens_BN=tokens_BN, above_BN=above_BN, depth_BN=depth_BN)


class ForcedChain(Forced, BlockChain):
    pass


class ForcedTree(Forced, BestPaths):
    pass


class ForcedSession(BlockProposerSession):
    proposer: ForcedProposer

    def __init__(self, proposer: ForcedProposer, request: Request) -> None:
        super().__init__(proposer, request)
        self.drafts_T = proposer.texts.drafts[tuple(request.tokens)]

    def propose(self, k: int) -> Proposal:
        nodes = len(super().propose(k))
        parents = tree_shape(nodes, k)
        depth_N = node_depths(parents, self.drafts_T.device)
        tokens_N = self.drafts_T[len(self.request.tokens) - 1 + depth_N]
        tokens_N = tokens_N + make_wrong(parents, tokens_N.device)
        tokens_N = tokens_N % self.proposer.texts.vocab_size
        return Proposal(tokens_N, "point", parents=parents if self.proposer.tree_nodes else None)


class ForcedProposer(BlockProposer):
    """Greedy drafting; nodes: 0 = a chain."""

    session = ForcedSession

    def __init__(self, network: BlockDrafter, nodes: int, texts: KnownTexts) -> None:
        super().__init__(network, None, nodes)
        self.texts = texts


class ForcedEngine(CapturedEngine):
    """Captured, or an error; without a proposer it decodes plainly."""

    def _take(self, key: RowsKey, group: Sequence[RequestRunner]) -> Rows:
        def make(proposer: ForcedProposer | None, sampling: Sampling, verifier: str) -> Drafting:
            if proposer is None:
                return Drafting()
            kind = ForcedTree if proposer.tree_nodes else ForcedChain
            drafting = kind(proposer, proposer.tree_nodes or proposer.draft_tokens)
            drafting.texts = proposer.texts
            return drafting

        with mock.patch.object(engine, "make_drafting", make):
            try:
                return super()._take(key, group)
            except Unsupported as error:
                raise RuntimeError(f"not captured: {error}") from None
