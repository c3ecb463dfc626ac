"""Drafting one request: lightened weights, and several blocks in one pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.data import shards as data
from align.models.block_session import BlockSession
from align.target.model import Target
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import trained_block as build


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_lightened_drafter_drafts_the_same_up_to_rounding(
    target: Target, samples: data.Samples, variant: dict[str, Any]
) -> None:
    heavy, light = build(target, samples, **variant), build(target, samples, **variant)
    light.load_state_dict(heavy.state_dict())
    light.prepare_for_drafting()
    results = []
    for drafter in (heavy, light):
        cache = target.new_cache(1, 20)
        session = BlockSession(drafter, cache, 20)
        output = target.forward(torch.arange(5, 15)[None], cache=cache, taps=session.taps)
        session.observe(output.hidden_BLD, output.taps_BLFD, 10)
        hidden = session.hidden(7)
        logits, inputs = drafter.logits(hidden), session.bias_inputs(hidden)
        results.append(logits if inputs is None else logits + session.bias(inputs[1], torch.tensor(9)))
    scale = float(results[0].abs().max())
    torch.testing.assert_close(results[1], results[0], atol=4e-2 * scale, rtol=4e-2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_in_one_pass_are_those_drafted_alone(
    target: Target, samples: data.Samples, variant: dict[str, Any]
) -> None:
    """Nothing of one block reaches another: not by attention, convolutions or a second pass."""
    drafter = build(target, samples, **variant)
    cache = target.new_cache(1, 12)
    session = BlockSession(drafter, cache, 12)
    output = target.forward(torch.arange(5, 12)[None], cache=cache, taps=session.taps)
    session.observe(output.hidden_BLD, output.taps_BLFD, 7)
    blocks_NR = torch.tensor([[7, 9, 3, 3, 3], [7, 3, 3, 3, 3], [7, 9, 11, 12, 3]])[:, : drafter.config.rows]
    together = session.hidden_of_blocks(blocks_NR)
    for block_R, hidden_KD in zip(blocks_NR, together, strict=True):
        torch.testing.assert_close(
            session.hidden_of_blocks(block_R[None])[0], hidden_KD, atol=1e-4, rtol=1e-4
        )
