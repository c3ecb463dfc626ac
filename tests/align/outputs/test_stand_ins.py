"""A target without its layers computes the same features out of its own states, whatever its architecture; or it is refused."""

from __future__ import annotations

import pytest
import torch

from align.makers.block import block_config
from align.outputs.stand_ins import StandIns, layers_asked, own_states
from specalign.common.batch import Batch
from specalign.models.target_features import target_features
from tests.builders import block_options
from tests.target_models import tiny_target


@pytest.mark.parametrize("context", ["taps", "shared_kv", None])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "gemma3_text", "bloom", "qwen3_next"])
def test_own_states_give_own_features(kind: str, context: str | None) -> None:
    """Layers that hand on tuples, embeddings with a scale, windows, ALiBi and recurrent states among them; only shared layers stay."""
    target = tiny_target(kind)
    config = (
        None
        if context is None
        else block_config(target, block_options(context=context, taps=2), None)
    )
    layers = layers_asked(target, config)
    StandIns(target, config, layers, torch.arange(20, 60)[None])
    stood = target.layers[0]
    kept = config.target_layer_ids if config is not None and context == "shared_kv" else []
    gone = [all(p.is_meta for p in layer.parameters()) for layer in target.layers]
    assert gone == [i not in kept for i in range(target.num_layers)]
    assert type(stood).__name__ == "_StandIn"


def test_features_are_of_the_states_that_are_given() -> None:
    whole, target = tiny_target("llama"), tiny_target("llama")
    config = block_config(target, block_options(context="shared_kv", target_layers=[1, 2]), None)
    layers, text = layers_asked(target, config), torch.arange(5, 30)[None]
    stood = StandIns(target, config, layers, torch.arange(20, 60)[None])
    places = torch.arange(25)[None]
    alone = Batch(text, places, torch.zeros_like(text), torch.ones_like(text, dtype=torch.bool))
    states = own_states(whole, text, layers)[0].transpose(0, 1)
    mine, its = stood.features(alone, states), target_features(whole, alone, config)
    for found, own in zip(mine.tensors, its.tensors, strict=True):
        torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-4)
    other = stood.features(alone, torch.randn(states.shape))
    assert not torch.allclose(other.values[0], its.values[0], atol=0.1)


def test_layers_that_are_asked_for() -> None:
    target = tiny_target("llama")
    last = target.num_layers - 1
    taps = block_config(target, block_options(context="taps", target_layers=[0, 2]), None)
    shared = block_config(target, block_options(context="shared_kv", target_layers=[0, 2]), None)
    assert layers_asked(target, taps) == tuple(sorted({0, 2, last}))
    assert layers_asked(target, shared) == tuple(
        sorted({1, last})
    )  # before layer 0 lies the embedding
    assert layers_asked(target, None) == (last,)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("gemma3n_text", "more than one state"), ("longcat_flash", "run several times")],
)
def test_layers_that_hand_on_more_are_refused(kind: str, why: str) -> None:
    target = tiny_target(kind)
    with pytest.raises(NotImplementedError, match=why):
        StandIns(target, None, layers_asked(target, None), torch.arange(20, 60)[None])
