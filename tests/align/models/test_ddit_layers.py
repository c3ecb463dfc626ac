"""Config and layers of a DDiT."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from align.common.errors import UserError
from tests.builders import ddit as network
from tests.builders import ddit_config as config
from tests.builders import random_tokens as tokens


def test_half_precision_keeps_norms_and_positions() -> None:
    """bf16 at position 3001: rotary tables taken from a rounded inv_freq would be off by radians."""
    net = network()
    half = network().to(torch.bfloat16)
    assert half.rotary_emb.inv_freq.dtype == torch.bfloat16
    cos, _ = half.rotary_emb(torch.tensor([[3001]]))
    assert torch.equal(cos, net.rotary_emb(torch.tensor([[3001]]))[0])
    x = 1000 + torch.randn(4, 16, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    normed, expected = half.output_layer.norm_final(x), net.output_layer.norm_final(x.float())
    torch.testing.assert_close(normed.float(), expected, atol=0.02, rtol=0.02)
    f_BLV = half(tokens(2, 5), torch.tensor([0.5, 1.5]))
    assert f_BLV.dtype == torch.bfloat16
    torch.testing.assert_close(f_BLV.float(), net(tokens(2, 5), torch.tensor([0.5, 1.5])), atol=0.4, rtol=0.1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_blocks": 0}, "n_blocks=0 must be a whole number from 1 to 1024"),
        ({"n_blocks": 10**7}, "n_blocks=10000000 must be a whole number from 1 to 1024"),
        ({"vocab_size": 10**400}, "must be a whole number from 1 to 16777216"),
        ({"hidden_size": "768"}, "hidden_size='768' must be a whole number"),
        ({"vocab_size": True}, "vocab_size=True must be a whole number"),
        ({"dropout": 1.0}, "dropout=1.0 must be a number within 0..1"),
        ({"dropout": float("nan")}, "dropout=nan must be"),
        ({"norm_bias": 1}, "norm_bias=1 must be true or false"),
        ({"time_input": "sigmas"}, "time_input='sigmas' is unknown.*did you mean 'sigma'"),
        ({"attention": "causal"}, "attention='causal' is unknown.*block_causal"),
        ({"attention": None}, "attention=None is unknown"),
        ({"hidden_size": 18, "n_heads": 4}, "hidden_size=18 must be a multiple of 2·n_heads=8"),
        ({"attention": "block_causal"}, "block_size=0 must be at least 1"),
        ({"block_size": 4}, "block_size=4 must be 0: only block_causal"),
    ],
)
def test_a_bad_config_says_why(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        config(**changes)
    assert "\n" not in str(caught.value)
