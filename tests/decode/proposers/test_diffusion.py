"""Standalone diffusion drafters in the engine: every order and number of steps keeps the target's law."""

from __future__ import annotations

import pytest
import torch

from decode import Sampling
from decode.engine.request import RequestRunner
from decode.proposers.diffusion import DiffusionProposer
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
        for k in (steps == step).nonzero()[:, 0].tolist():
            torch.testing.assert_close(
                proposal.q.dense(target.vocab_size)[k], q[k], atol=1e-5, rtol=1e-4
            )


def test_what_may_not_come_yet_is_barred_as_far_as_the_last_position(target: Target) -> None:
    """A minimum length ends within the draft: end of sequence is barred before, and free after it."""
    _, session = sessions(
        target, DiffusionProposer(drafter(target, "ddit"), 4), Sampling(1.0, min_new_tokens=4)
    )
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
    laws = {
        (steps, order, temperature): DiffusionProposer(made, 3, steps, order).law(
            Sampling(temperature)
        )
        for steps in (1, 2, 3)
        for order in ORDERS
        for temperature in (0.0, 1.0)
    }
    for (steps, order, temperature), law in laws.items():
        several = "causal" if order == "left_to_right" else "unmasked"
        drawn = "independent" if steps == 1 else several
        assert law == ("point" if temperature == 0 else drawn), (steps, order)
    assert DiffusionProposer(made, 1, 3).law(Sampling(1.0)) == "independent"
