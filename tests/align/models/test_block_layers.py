"""Attention of blocks."""

from __future__ import annotations

import pytest
import torch

from align.models.block_layers import BlockAttention
from align.target.model import Target
from tests.builders import block_network


@pytest.mark.parametrize("qk_norm", [False, True])
def test_masked_blocks_attend_as_each_alone(target: Target, qk_norm: bool) -> None:
    config = block_network(target, "taps").config
    config.qk_norm = qk_norm
    torch.manual_seed(0)
    attention, width = BlockAttention(config), config.head_dim
    x = torch.randn(1, 2, 3, config.hidden_size)  # two blocks of three
    angle = torch.rand(1, 2, 3, width // 2).repeat(1, 1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    keys, values = (torch.randn(1, config.num_key_value_heads, 7, width) for _ in range(2))
    see = torch.arange(7) < torch.tensor([[[3], [6]]])  # each block sees what lies before it
    whole = attention(x, cos, sin, (keys, values), see)
    for block, length in enumerate((3, 6)):
        one = slice(block, block + 1)
        context = keys[:, :, :length], values[:, :, :length]
        alone = attention(x[:, one], cos[:, one], sin[:, one], context, None)
        torch.testing.assert_close(whole[:, one], alone, atol=1e-5, rtol=1e-5)
