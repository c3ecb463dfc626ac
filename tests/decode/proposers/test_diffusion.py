"""Standalone diffusion drafters in the engine: every order and number of steps keeps the target's law; several drafts from
one step's marginals, and drafts that are refined."""

import math
from itertools import product

import pytest
import torch

from decode import Sampling
from decode.engine.request import RequestRunner
from decode.proposers.diffusion import DiffusionProposer
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.proposers.tolerator import ToleratorProposer
from decode.speculation.tree import depths
from decode.systems.registry import ORDERS
from specalign.lm.model import Target
from tests.builders import PROMPT, prefill
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions


@pytest.mark.parametrize("order", ORDERS)
def test_q_is_what_tokens_are_drawn_from(target: Target, order: str) -> None:
    """Steps and rows of q against a replay: each step's block is rebuilt from the tokens that earlier steps drew."""
    made = drafter(target, "ddit")
    proposer, sampling = DiffusionProposer(made, 5, 3, order), Sampling(0.9, seed=4)
    runner = RequestRunner(target, PROMPT, 20, sampling, proposer, "point_mass")
    with torch.no_grad():
        prefill(runner)
        session = runner.session
        assert session is not None
        proposal = session.propose(5)
    assert proposal is not None and proposal.q is not None
    steps = proposal.steps_K
    if order == "left_to_right":
        assert proposal.law == "causal" and steps is None
        steps = torch.tensor([0, 0, 1, 1, 2])
    else:
        assert proposal.law == "unmasked" and proposal.state_only and steps is not None
        assert torch.bincount(steps).tolist() == [2, 2, 1]
    for step in range(3):
        block = torch.where(steps < step, proposal.tokens_K, made.mask_id)
        q = (session.context.denoise(block) / 0.9).softmax(-1)  # type: ignore[attr-defined]
        at, dense = steps == step, proposal.q.dense(target.vocab_size)
        torch.testing.assert_close(dense[at], q[at], atol=1e-5, rtol=1e-4)


def test_what_may_not_come_yet_is_barred_as_far_as_the_last_position(target: Target) -> None:
    """A minimum length ends within the draft: end of sequence is barred before, and free after it."""
    proposer = DiffusionProposer(drafter(target, "ddit"), 4)
    _, session = sessions(target, proposer, Sampling(1.0, min_new_tokens=4))
    count = session.request.history.count
    for places in ([0, 1, 2, 3], [2, 3], [3], [1]):
        barred = session.before(torch.tensor(places)).barred
        for row, place in enumerate(places):
            its = barred if barred is None or barred.dim() == 1 else barred[row]
            ends = [its is not None and bool(its[i]) for i in target.eos_ids]
            assert ends == [count + place < 4] * len(ends)


def test_the_law_follows_steps_order_and_temperature(target: Target) -> None:
    """A wrong law lets a verifier in that is not exact for the drafts."""
    made = drafter(target, "ddit")
    for steps, order, temperature in product((1, 2, 3), ORDERS, (0.0, 1.0)):
        law = DiffusionProposer(made, 3, steps, order).law(Sampling(temperature))
        several = "causal" if order == "left_to_right" else "unmasked"
        drawn = "independent" if steps == 1 else several
        assert law == ("point" if temperature == 0 else drawn), (steps, order)
    assert DiffusionProposer(made, 1, 3).law(Sampling(1.0)) == "independent"


def test_candidates_are_draws_from_one_steps_marginals(target: Target) -> None:
    own = drafter(target, "ddit")
    drafts = SpecDiff2Proposer(own, 4, 5, draft_temperature=1.5, keep_q=True)
    _, session = sessions(target, drafts, Sampling(0.7, seed=1))  # type: ignore[arg-type]
    with torch.no_grad():
        proposal = session.propose(4)
        q_KV = (session.context.denoise(session.append_masks(4)) / 1.5).softmax(-1)
    assert proposal.law == "independent" and proposal.siblings == "iid" and len(proposal) == 20
    expected = q_KV[torch.tensor(depths(proposal.parents)) - 1]
    found = proposal.q.dense(target.vocab_size)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_the_least_confident_drafts_are_masked_again(target: Target) -> None:
    """Tolerator: filling, then refining rounds, replayed by hand."""
    made = drafter(target, "ddit")
    proposer = ToleratorProposer(made, 4, steps=2, rounds=2)
    _, session = sessions(target, proposer, Sampling())
    mask = made.mask_id
    with torch.no_grad():
        proposal = session.propose(4)
        block, peak = torch.full((4,), mask), torch.zeros(4)
        for remask, count in ((0, 2), (0, 2), (round(4 * math.cos(math.pi / 4)), None), (1, None)):
            if remask:
                block[peak.topk(remask, largest=False).indices] = mask
            logits = session.context.denoise(block)[:, : target.vocab_size]
            peaks = logits.softmax(-1).amax(-1)
            open_places = peaks.masked_fill(block != mask, -1.0)
            chosen = open_places.topk(count or remask).indices
            peak[chosen], block[chosen] = peaks[chosen], logits[chosen].argmax(-1)
    assert proposal.law == "point" and proposal.tokens_K.tolist() == block.tolist()
    assert proposer.law(Sampling(1.0)) == "point"
