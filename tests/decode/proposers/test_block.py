"""The block drafter inside the engine: same output, honest q, context in step. Random networks: wiring,
nothing else."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from decode import Decoder, Sampling
from decode.engine.request import RequestRunner
from decode.proposers.block import BlockProposer, BlockProposerSession
from decode.speculation.sampling import ProcessorState, probs
from specalign.common.errors import UserError
from specalign.kernels.linear import rows_library
from specalign.kernels.tree import KINDS as TREE_KINDS
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from tests.builders import BLOCK_VARIANTS as VARIANTS
from tests.builders import PROMPT, VARIED, fresh_session, prefill, run_request
from tests.builders import block_network as network

pytestmark = pytest.mark.usefixtures("endless")


CONTEXTS = ("shared", "taps", "markov confidence", "fill-in", "fill-in convolution")
"""Of other kinds of Markov heads they are the same."""


@pytest.mark.slow
@pytest.mark.parametrize("variant", CONTEXTS)
@pytest.mark.parametrize("nodes", [0, 9])
def test_the_drafters_context_keeps_step_with_the_text(
    target: Target, variant: str, nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every proposal the session equals one that has seen the committed text in a single forward."""
    net = network(target, **VARIANTS[variant])
    propose, seen = BlockProposerSession.propose, []

    def watched(self: BlockProposerSession, k: int) -> Any:
        seen.append((list(self.request.tokens), self.session.draft_hidden(self.request.tokens[-1])))
        return propose(self, k)

    monkeypatch.setattr(BlockProposerSession, "propose", watched)
    accepted = 0
    drafter, verifier = BlockProposer(net, tree_nodes=nodes), "point_mass" if nodes else "token"
    # a random drafter's acceptance is small and differs from machine to machine
    for seed in range(20):
        accepting = Sampling(1.0, top_k=40, seed=seed)
        runner = RequestRunner(target, PROMPT, 24, accepting, drafter, verifier)
        accepted += sum(run_request(runner).accepted)
        if accepted > 3:
            break
    assert accepted > 3 and len(seen) > 5
    for tokens, hidden in seen:
        expected = fresh_session(net, tokens).draft_hidden(tokens[-1])
        torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=1e-3)


def proposals(
    target: Target, net: BlockDrafter, sampling: Sampling, count: int
) -> tuple[BlockProposerSession, list[Any]]:
    """Many proposals from the same state."""
    runner = RequestRunner(target, PROMPT, 20, sampling, BlockProposer(net), "token")
    with torch.no_grad():
        prefill(runner)
        assert isinstance(runner.session, BlockProposerSession)
        return runner.session, [runner.session.propose(3) for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_q_is_the_processed_softmax(target: Target, variant: str) -> None:
    """By the definition, from the head's own rows. (That tokens are drawn from it: tests/decode/test_draws.py.)"""
    net = network(target, **VARIANTS[variant])
    sampling = Sampling(0.9, top_k=3, repetition_penalty=1.2, seed=5)
    drafts, found = proposals(target, net, sampling, 8)
    ids = torch.arange(target.vocab_size) if net.draft_vocab is None else net.draft_vocab
    seen = torch.tensor([int(t) in drafts.request.tokens for t in ids])
    hidden = drafts.session.draft_hidden(drafts.request.tokens[-1])
    for proposal in found:
        assert proposal.law == ("causal" if net.markov else "independent") and len(proposal) == 3
        assert (proposal.q.ids is None) == (net.draft_vocab is None)
        path = [drafts.request.tokens[-1], *proposal.tokens_K.tolist()]
        for k, previous in enumerate(path[:-1]):
            inputs = drafts.session.bias_inputs(hidden[k])
            bias = 0 if inputs is None else drafts.session.bias(inputs, torch.tensor(previous))
            expected = torch.zeros(target.vocab_size)
            expected[ids] = probs(net.logits(hidden[k]) + bias, sampling, ProcessorState(seen))
            found_V = proposal.q.dense(target.vocab_size)[k]
            torch.testing.assert_close(found_V, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("variant", ["confidence", "markov confidence"])
def test_a_draft_stops_where_its_confidence_ends(target: Target, variant: str) -> None:
    """Before the first position, the first one aside, whose path so far is too unlikely to be accepted, and nowhere else."""
    net = network(target, **VARIANTS[variant])
    drafts, whole = proposals(target, net, Sampling(1.0, seed=1), 60)
    last, hidden = drafts.request.tokens[-1], drafts.session.draft_hidden(drafts.request.tokens[-1])

    def reach(tokens_K: torch.Tensor) -> torch.Tensor:
        """How probably a draft gets as far as each position, from the definition."""
        assert net.confidence is not None
        before = torch.tensor([last, *tokens_K.tolist()])[: len(hidden)]
        return net.confidence(hidden[: len(before)], target.embed(before)).sigmoid().cumprod(0)

    least = float(torch.stack([reach(x.tokens_K)[2] for x in whole]).median())
    drafts.proposer.confidence = least
    stopped = [drafts.propose(4) for _ in range(60)]
    for proposal in stopped:
        reached, size = reach(proposal.tokens_K), len(proposal)
        assert bool((reached[1:size] >= least).all())
        assert size == 4 or float(reached[size]) < least
        assert proposal.q is not None and len(proposal.q.dense(target.vocab_size)) == size
    assert len({len(x) for x in stopped}) > 1


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
@pytest.mark.parametrize("variant", VARIANTS)
def test_trees_in_one_call(target: Target, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With penalties, a minimum length and banned tokens as well, which the one call does not know."""
    net = network(target, **VARIANTS[variant])
    net.prepare_for_drafting()
    propose, calls, kept = BlockProposerSession.propose, [], net.draft_head
    assert (kept is None) == (net.config.markov_kind not in ("", *TREE_KINDS))

    def recorded(self: BlockProposerSession, k: int) -> Any:
        found = propose(self, k)
        calls.append((found.tokens_K.tolist(), found.parents))
        return found

    monkeypatch.setattr(BlockProposerSession, "propose", recorded)
    processed = replace(VARIED, min_new_tokens=9, banned=(5, 6))
    for settings in (Sampling(), Sampling(0.6, seed=0), processed):
        seen = []
        for tree in (kept, None):
            net.draft_head, calls = tree, []
            decoder = Decoder(target, BlockProposer(net, tree_nodes=7))
            decoder.generate(PROMPT, max_new_tokens=10, sampling=settings)
            seen.append(calls)
        assert seen[0] == seen[1] and max(len(tokens) for tokens, _ in calls) == 7


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chain_in_one_call_is_that_drawn_token_by_token(target: Target, variant: str) -> None:
    """The same tokens from the same numbers, and the same q; where more than a temperature is asked for, it is not taken."""
    net = network(target, **VARIANTS[variant])
    net.prepare_for_drafting()
    kept = net.draft_head
    for sampling, whole in ((Sampling(0.8, seed=3), True), (Sampling(0.8, top_k=5, seed=3), False)):
        drafts, found = proposals(target, net, sampling, 8)
        in_c = drafts._draw_chain_in_c(torch.zeros(3, target.hidden_size))
        assert (in_c is not None) == (whole and kept is not None)
        net.draft_head = None
        _, expected = proposals(target, net, sampling, 8)
        net.draft_head = kept
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tokens_K.tolist() == theirs.tokens_K.tolist() and mine.law == theirs.law
            torch.testing.assert_close(mine.q.probs, theirs.q.probs, atol=1e-5, rtol=1e-3)


def test_confidence_stops_chains_alone(target: Target) -> None:
    for confident, nodes in ((True, 5), (False, 0)):
        net = network(target, "shared_kv", confidence=confident)
        with pytest.raises(UserError, match=r"confidence=0.5 needs .*recipe=smollm2_confidence"):
            BlockProposer(net, tree_nodes=nodes, confidence=0.5)
