"""Layers that keep more than keys and values are rolled back: the text is as if lost drafts had never been."""

import pytest
import torch

from decode.speculation.tree import ancestors
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
            right = tokens[:, at : at + kept]
            drafts = torch.cat((right[:, :1], wrong[:, :2], right[:, 1:]), 1)
            rows = [0, *range(3, 2 + kept)]
            see_LL = ancestors((-1, -1, -1, *range(2, kept))[: kept + 1])
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
