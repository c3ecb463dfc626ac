"""Parts that are added to a trained drafter change nothing at first."""

from __future__ import annotations

from dataclasses import replace

import torch

from align.config.drafter import DrafterConfig
from align.data import packing
from align.data import shards as data
from align.makers.block import from_target
from specalign.diffusion.noise import sample_anchors
from specalign.lm.model import Target
from specalign.models.block_parts import (
    add_convolution,
)
from specalign.models.block_session import BlockSession
from specalign.models.target_features import target_features
from tests.builders import trained_block as build


def test_what_is_added_changes_no_bit_of_a_trained_drafter(
    target: Target, samples: data.Samples
) -> None:
    """In training and in decoding; and a fresh drafter's other weights are what they are without."""
    drafter = build(target, samples, markov_rank=8)
    batch = packing.collate(packing.pack(samples, 64, seed=0))
    anchors = sample_anchors(batch, 12, 4, torch.Generator().manual_seed(2))
    features, session = (
        target_features(target, batch, drafter.config),
        BlockSession(drafter, target.new_cache(1, 8), 8),
    )
    output = target.forward(torch.arange(5, 9)[None], cache=session.cache)
    session.observe(output.hidden_BLD, None, 4)
    before = drafter(batch, features, anchors), session.hidden(7)
    add_convolution(drafter)
    assert torch.equal(drafter(batch, features, anchors), before[0])
    assert torch.equal(session.hidden(7), before[1])
    options = DrafterConfig(markov_rank=8)
    both = replace(options, convolution=True)
    with_it = from_target(target, both, None).state_dict()
    without = from_target(target, options, None).state_dict()
    assert all(torch.equal(with_it[name], value) for name, value in without.items())
