"""The parts of a block drafter: training's attention is drafting's, block by block."""

from __future__ import annotations

import pytest
import torch

from align.models.block_layers import BlockAttention, ConfidenceHead, RMSNorm
from align.target.model import Target
from tests.builders import block_network


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_attends_alike_in_training_and_in_drafting(target: Target, qk_norm: bool) -> None:
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
        alone = attention.draft(
            x[:, block], cos[:, block], sin[:, block], keys[:, :, :length], values[:, :, :length], None
        )
        torch.testing.assert_close(whole[:, block], alone, atol=1e-5, rtol=1e-5)


def test_the_norm_is_x_over_its_root_mean_square() -> None:
    x = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(RMSNorm(2, 0.0)(x), x / 12.5**0.5)


def test_a_new_confidence_head_says_one_half() -> None:
    said = ConfidenceHead(4)(torch.randn(2, 3, 4), torch.randn(2, 3, 4)).sigmoid()
    assert said.shape == (2, 3) and bool((said == 0.5).all())
