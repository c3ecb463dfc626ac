"""The debug targets: tiny, and the same on every machine."""

from __future__ import annotations

import pytest
import torch

from align.target.debug import DEBUG, debug_model


@pytest.mark.parametrize("name", DEBUG)
def test_the_same_every_time(name: str) -> None:
    (one, tokenizer), (two, _) = debug_model(DEBUG[name]), debug_model(DEBUG[name])
    weights = two.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in one.state_dict().items())
    assert sum(p.numel() for p in one.parameters()) < 400_000 and one.config.num_hidden_layers == 4
    assert tokenizer.decode(tokenizer("Grüße, 你").input_ids) == "Grüße, 你"
