"""What the modules of all drafters share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.training.block_module import BlockDrafterModule
from specalign.common.batch import Step
from specalign.lm.model import Target
from tests.builders import ANCHORS, block_network, packed_batch


@pytest.fixture
def module(target: Target, tmp_path: Path) -> BlockDrafterModule:
    recipe = load_recipe(["recipe=debug_block", f"output={tmp_path}"])
    return BlockDrafterModule(block_network(target, "shared_kv"), recipe)


def test_which_anchors_tell_tau(module: BlockDrafterModule, target: Target) -> None:
    """Written by the target, and with K valid drafts, or fewer that end in end-of-sequence."""
    batch = packed_batch(target)
    batch.answer_BL[1, :5] = False  # the anchor at 1 is the template's
    valid = torch.ones(2, 3, 3, dtype=torch.bool)
    valid[0, 1, 2] = valid[0, 2, 1:] = False  # cut after two, and after one
    batch.tokens_BL[0, 12] = target.eos_ids[0]  # the one after the anchor at 11
    step = Step(batch, type(ANCHORS)(ANCHORS.index_BA, valid))
    assert module.complete(step).tolist() == [[True, False, True], [False, True, True]]
    step.written = (True, False)  # the second row is other text
    assert module.complete(step).tolist() == [[True, False, True], [False, False, False]]
