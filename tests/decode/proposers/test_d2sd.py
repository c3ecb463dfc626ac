"""D²SD: its boundaries are the rank_boundaries first mistakes, its branches what the second network says behind them, one pass
for all; the output is the target's. Random networks: wiring, nothing else."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from decode import Sampling
from decode.engine.request import RequestRunner
from decode.proposers.d2sd import D2SDProposer, D2SDSession
from decode.speculation.proposal import Proposal
from decode.speculation.tree import chain
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from tests.builders import DRAFT_IDS as IDS
from tests.builders import PROMPT, VARIED, fresh_session, prefill, run_request
from tests.builders import sharp_block_network as network
from tests.builders import tree_prefixes as prefixes
from tests.d2sd_reference import by_definition, rows_by_definition
from tests.exact_distribution import exact_law

pytestmark = pytest.mark.usefixtures("endless")


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared, shared markov": ({"context": "shared_kv"}, {"context": "shared_kv", "markov_rank": 8}),
    "taps, other taps": ({"context": "taps"}, {"context": "taps", "target_layers": [2, 0], "whole": True, "block_layout": "fill_in"}),
    "taps, shared longer": ({"context": "taps", "block_layout": "fill_in"}, {"context": "shared_kv", "size": 6, "whole": True}),
}  # fmt: skip


@cache
def networks(target: Target, name: str, ids: Tensor) -> tuple[BlockDrafter, BlockDrafter]:
    """Made once: drafting changes no network."""
    one, two = PAIRS[name]
    return network(target, 1, ids=ids, **one), network(target, 2, ids=ids, **two)


def pair(target: Target, name: str, ids: Tensor = IDS, **options: Any) -> D2SDProposer:
    return D2SDProposer(*networks(target, name, ids), **options)


@cache
def likely(target: Target) -> Tensor:
    """Tokens that the target says soon after the prompt: a draft of them is accepted now and then."""
    law = exact_law(target, PROMPT, 4, Sampling(1.0, top_k=2))
    return torch.tensor(sorted({token for x in law for token in x}))


def begun(
    target: Target, drafter: D2SDProposer, sampling: Sampling, verifier: str = "point_mass"
) -> D2SDSession:
    """A request after its prompt and first token."""
    verifier = "greedy" if sampling.greedy else verifier
    runner = RequestRunner(target, PROMPT, 20, sampling, drafter, verifier)
    prefill(runner)
    assert isinstance(runner.session, D2SDSession)
    return runner.session


def paths(tree: Proposal) -> list[tuple[int, ...]]:
    parents = chain(len(tree)) if tree.parents is None else tree.parents
    return prefixes(tuple(tree.tokens_K.tolist()), parents)[1:]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_the_tree_is_the_first_draft_and_branches(target: Target, name: str, k: int) -> None:
    boundaries, wider = [], 0
    for penalty in (1.0, 1.3, 1.7, 2.5):
        sampling = replace(VARIED, temperature=0.0, repetition_penalty=penalty)
        drafter = pair(target, name, boundaries=2)
        drafts = begun(target, drafter, sampling)
        tree = drafts.propose(k)
        expected, kept = by_definition(drafts, k)
        found = paths(tree)
        assert len(found) == len(set(found)) and set(found) == expected
        assert tree.law == "point" and tree.q is None and tree.depth == k
        assert len(tree) <= drafter.draft_nodes
        boundaries.append(kept)
        wider += len(tree) > k
    assert wider, "no branch ever said anything else"
    if k == 4:
        assert any(kept[1] > 1 for kept in boundaries)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("k", [1, 3, 4])
def test_drawn_tokens_come_with_their_q(target: Target, name: str, k: int) -> None:
    for sampling in (Sampling(1.0, seed=3), replace(VARIED, temperature=0.9)):
        drafter = pair(target, name, boundaries=2)
        drafts = begun(target, drafter, sampling, "recursive")
        tree = drafts.propose(k)
        assert tree.law == "causal" and tree.q is not None and tree.depth == k
        q_NV = tree.q.dense(target.vocab_size)
        torch.testing.assert_close(q_NV.sum(1), torch.ones(len(tree)))
        tokens, parents = tree.tokens_K.tolist(), tree.parents or chain(len(tree))
        assert parents[:k] == chain(k)
        expected = rows_by_definition(drafts, drafter.first, [], tokens[:k])
        torch.testing.assert_close(q_NV[:k], expected, atol=1e-5, rtol=1e-3)
        starts = [n for n in range(k, len(tree)) if parents[n] != n - 1 or parents[n] < k - 1]
        kept = [parents[n] + 1 for n in starts]
        assert len(set(kept)) == len(kept) == min(2, k) and kept == sorted(kept)
        for n, i in zip(starts, kept, strict=True):
            draft = [*tokens[:i], *tokens[n : n + k - i]]
            assert parents[n : n + k - i] == (i - 1, *range(n, n + k - i - 1))
            expected = rows_by_definition(drafts, drafter.second, draft[:i], draft)[i:]
            torch.testing.assert_close(q_NV[n : n + k - i], expected, atol=1e-5, rtol=1e-3)
        assert (tree.siblings == "independent") == bool(kept)


@pytest.mark.parametrize("name", PAIRS)
def test_both_contexts_follow(target: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before every proposal both sessions equal new ones that see the committed text in a single forward."""
    drafter, propose, seen = pair(target, name, likely(target)), D2SDSession.propose, []

    def watched(self: D2SDSession, k: int) -> Proposal:
        last = self.request.tokens[-1]
        drafted = self.first.draft_hidden(last), self.second.draft_hidden(last)
        seen.append((list(self.request.tokens), *drafted))
        return propose(self, k)

    monkeypatch.setattr(D2SDSession, "propose", watched)
    accepted = 0
    # a random drafter's acceptance is small and differs from machine to machine
    for seed in range(40):
        sampling = Sampling(1.0, top_k=2, seed=seed)
        runner = RequestRunner(target, PROMPT, 8, sampling, drafter, "point_mass")
        accepted += sum(run_request(runner).accepted)
        if accepted > 3 and len(seen) > 5:
            break
    assert accepted > 3 and len(seen) > 5
    for tokens, *states in seen:
        for net, hidden in zip((drafter.first, drafter.second), states, strict=True):
            expected = fresh_session(net, tokens).draft_hidden(tokens[-1])
            torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-3)
