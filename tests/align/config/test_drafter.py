"""Names that the drafter's keys take are those of the code that reads them."""

from __future__ import annotations

from typing import get_args, get_type_hints

from align.config.drafter import LOSS_NAMES, PARTS, DrafterConfig
from align.losses.objective import Objective
from align.models.block import BlockDrafter
from align.target.model import Target
from align.training.build import KINDS as DRAFTERS
from tests.builders import block_network


def test_every_loss_can_be_an_objective() -> None:
    for name in LOSS_NAMES:
        Objective({name: 1.0}, "uniform", 1.0, 1.0)


def test_parts_are_weights_of_a_block_drafter(target: Target) -> None:
    every = {"convolution": True, "self_conditioning": True, "confidence_head": True, "markov_rank": 4}
    drafter: BlockDrafter = block_network(target, "taps", whole=True, options=every)
    names = [name for name, _ in drafter.named_parameters()]
    assert all(any(part in name for name in names) for part in PARTS.values())


def test_kinds_are_those_that_are_made() -> None:
    hints = get_type_hints(DrafterConfig)
    assert set(get_args(hints["kind"])) == set(DRAFTERS)
