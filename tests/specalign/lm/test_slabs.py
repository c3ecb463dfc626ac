"""Layers that keep more than keys and values, or ask for them in their own way."""

from __future__ import annotations

import pytest
import torch

from tests.target_models import some_text, tiny_model, tiny_target


@pytest.mark.parametrize(
    ("kind", "chains"), [("deepseek_v32", False), ("minimax_m3_vl_text", True)]
)
def test_indexers_keys_are_rolled_back_with_the_others(kind: str, chains: bool) -> None:
    """Past the number of keys that an indexer chooses; kept paths of a tree where they may branch."""
    target, own = tiny_target(kind), tiny_model(kind, 260)
    assert target.chains_only is chains
    assert any(shape is not None and shape.indexer == 16 for shape in target.anatomy.shapes)
    tokens, wrong, at = some_text(target, 60), some_text(target, 4, 1), 30
    with torch.no_grad():
        wanted = own(tokens).logits
    cache = target.new_cache(1, 64)
    found = [target.forward(tokens[:, :at], cache=cache).logits_BLV]
    for kept in (1, 3, 2, 4, 1, 2, 3):
        if chains:
            drafts = torch.cat((tokens[:, at : at + kept], wrong), 1)
            rows, see_LL = list(range(kept)), None
        else:  # rejected siblings in front of the tokens that follow the first
            drafts = torch.cat(
                (tokens[:, at : at + 1], wrong[:, :2], tokens[:, at + 1 : at + kept]), 1
            )
            rows, see_LL = [0, *range(3, 2 + kept)], torch.eye(kept + 2, dtype=torch.bool)
            see_LL[:, 0] = True
            see_LL[3:, 3:] = torch.ones(kept - 1, kept - 1).tril().bool()
        output = target.forward(drafts, cache=cache, see_LL=see_LL).logits_BLV
        assert output is not None
        found.append(output[:, rows])
        cache.keep(at, rows)
        at += kept
    assert cache.length == at
    torch.testing.assert_close(torch.cat(found, 1), wanted[:, :at], atol=1e-4, rtol=1e-3)  # type: ignore[arg-type]
    copies = target.new_cache(2, 64)
    copies.fill(cache)
    copies.advance(at)
    copies.select(torch.tensor([1]))
    again = target.forward(tokens[:, at:], cache=copies).logits_BLV
    torch.testing.assert_close(again, wanted[:, at:], atol=1e-4, rtol=1e-3)
