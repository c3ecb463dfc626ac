"""Our attention under transformers' interface: the model's own numbers, and nothing that it does not know."""

from __future__ import annotations

import pytest
import torch

from specalign.lm import interface
from specalign.lm.masks import Layout, laid
from tests.target_models import tiny_model


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])  # plain, capped, with sinks
def test_a_model_computes_what_it_did(kind: str) -> None:
    model, tokens = tiny_model(kind, 260), torch.arange(4, 40)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        interface.install(model)
        with laid(Layout(torch.arange(36)[None], 0, 2, torch.float32)):
            torch.testing.assert_close(model(tokens).logits, expected, atol=2e-5, rtol=2e-4)
    assert model.config._attn_implementation == interface.NAME
