"""The cache rolls back by its length and refuses to overflow."""

from __future__ import annotations

import pytest
import torch

from specalign.lm.model import Target


def test_rollback_is_a_length(target: Target) -> None:
    tokens = torch.arange(4, 24)[None]
    cache = target.new_cache(1, 32)
    target.forward(tokens[:, :10], cache=cache)
    target.forward(torch.full((1, 5), 7), cache=cache)  # a draft that is thrown away
    cache.length = 10
    again = target.forward(tokens[:, 10:], cache=cache).logits_BLV
    torch.testing.assert_close(
        again, target.forward(tokens).logits_BLV[:, 10:], atol=2e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="rolled back"):
        cache.length = 31
    with pytest.raises(ValueError, match="full"):
        target.forward(torch.ones(1, 13, dtype=torch.int64), cache=cache)
