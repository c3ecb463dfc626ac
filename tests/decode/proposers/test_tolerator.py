"""Tolerator: filling, then refining rounds, replayed by hand."""

from __future__ import annotations

import math

import torch

from decode import Sampling
from decode.proposers.tolerator import ToleratorProposer
from specalign.lm.model import Target
from tests.builders import diffusion_drafter as drafter
from tests.builders import session_after_prefill as sessions


def test_drafts_are_filled_then_the_least_confident_are_masked_again(target: Target) -> None:
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
