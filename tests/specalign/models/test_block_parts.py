"""Parts that are added to a trained drafter change nothing at first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.data import packing
from align.data import shards as data
from align.makers.block import from_target
from specalign.common.errors import UserError
from specalign.diffusion.noise import sample_anchors
from specalign.formats.block import load_drafter, save_drafter
from specalign.lm.model import Target
from specalign.models.block_parts import (
    add_convolution,
    merge_low_rank,
    with_low_rank,
)
from specalign.models.block_session import BlockSession
from specalign.models.target_features import target_features
from tests.builders import ANCHORS, packed_batch
from tests.builders import trained_block as build


def test_low_rank_updates_start_at_nothing_and_merge_to_what_they_computed(
    target: Target, samples: data.Samples, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    drafter = build(target, samples, context="taps", markov_rank=8)
    batch = packed_batch(target)
    features = target_features(target, batch, drafter.config)
    as_it_was = drafter(batch, features, ANCHORS)
    with_low_rank(drafter, 2, 4.0, ["q_proj", "down_proj", "fc"], seed=0)
    assert torch.equal(drafter(batch, features, ANCHORS), as_it_was)
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (2 * 2 + 1) and all("lora_" in name for name in trained)
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(0.1)
    updated = drafter(batch, features, ANCHORS)
    with pytest.raises(ValueError, match="merge_low_rank"):
        save_drafter(drafter, tmp_path)
    merge_low_rank(drafter)
    merge_low_rank(drafter)  # nothing more happens
    save_drafter(drafter, tmp_path, dtype=torch.float32)
    again = load_drafter(tmp_path, target)(batch, features, ANCHORS)
    torch.testing.assert_close(again, updated, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(updated, as_it_was, atol=1e-2)
    with pytest.raises(UserError, match="LoRA: .*no_such_layer"):
        with_low_rank(drafter, 2, 4.0, ["no_such_layer"], seed=0)


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
