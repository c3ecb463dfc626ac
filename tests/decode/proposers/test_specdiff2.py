"""Several drafts from one step's marginals, and drafts that are looked at again: laws, shapes, what is refused."""

from __future__ import annotations

import torch

from decode import Sampling
from decode.proposers.specdiff2 import SpecDiff2Proposer
from decode.speculation.tree import depths
from specalign.lm.model import Target
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions


def test_candidates_are_draws_from_one_steps_marginals(target: Target) -> None:
    own = drafter(target, "ddit")
    drafts = SpecDiff2Proposer(own, 4, 5, draft_temperature=1.5, keep_q=True)
    _, session = sessions(target, drafts, Sampling(0.7, seed=1))  # type: ignore[arg-type]
    with torch.no_grad():
        proposal = session.propose(4)
        q_KV = (session.context.denoise(session.append_masks(4)) / 1.5).softmax(-1)
    assert proposal.law == "independent" and proposal.siblings == "iid" and len(proposal) == 20
    q_NV = proposal.q.dense(target.vocab_size)
    torch.testing.assert_close(
        q_NV, q_KV[torch.tensor(depths(proposal.parents)) - 1], atol=1e-5, rtol=1e-4
    )
