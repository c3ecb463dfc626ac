"""Recurrent states are rolled back by snapshot and replay: the text is as if lost drafts had never been."""

from __future__ import annotations

import pytest
import torch

from tests.target_models import some_text, tiny_model, tiny_target


@pytest.mark.parametrize(
    "kind", ["lfm2", "qwen3_next", "mamba", pytest.param("falcon_h1", marks=pytest.mark.slow)]
)
def test_recurrent_states_are_rolled_back(kind: str) -> None:
    """Drafts that are lost, one after the other, far back too: the states are as if they had never been."""
    target, own = tiny_target(kind), tiny_model(kind, 260)
    assert target.chains_only
    tokens, wrong = some_text(target, 52), some_text(target, 5, 1)
    with torch.no_grad():
        wanted = own(tokens).logits
    cache, at = target.new_cache(1, 60), 20
    found = [target.forward(tokens[:, :at], cache=cache).logits_BLV]
    for kept in (1, 3, 1, 2, 4, 1, 1, 3, 2, 1, 4):
        drafts = torch.cat((tokens[:, at : at + kept], wrong[:, kept:]), 1)
        output = target.forward(drafts, cache=cache).logits_BLV
        assert output is not None
        found.append(output[:, :kept])
        cache.keep(at, list(range(kept)))
        at += kept
    torch.testing.assert_close(torch.cat(found, 1), wanted[:, :at], atol=5e-4, rtol=1e-3)  # type: ignore[arg-type]
    cache.length = 9
    again = target.forward(tokens[:, 9:], cache=cache).logits_BLV
    torch.testing.assert_close(again, wanted[:, 9:], atol=5e-4, rtol=1e-3)
