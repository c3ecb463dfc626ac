"""A convolution starts as the identity, and other weights start as they do without it."""

from __future__ import annotations

import torch

from align.makers.block import from_target
from specalign.lm.model import Target
from tests.builders import block_options as options


def test_convolutions_change_no_other_weight(target: Target) -> None:
    with_it = from_target(target, options(markov_rank=8, convolution=True), None)
    without = from_target(target, options(markov_rank=8), None)
    state = with_it.state_dict()
    assert all(torch.equal(state[name], value) for name, value in without.state_dict().items())
    assert not any(value.any() for name, value in state.items() if "_conv." in name)
