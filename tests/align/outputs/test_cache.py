"""Kept views of the target: the same numbers as looking anew, whatever the room, and far fewer forwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.config.trainer import TrainerConfig
from align.data import packing
from align.data import shards as data
from align.losses.divergences import logit_statistics
from align.makers.block import from_target
from align.outputs import cache as target_cache
from align.training.datamodule import make_batch
from specalign.common.batch import Step
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig


def scene(context: str) -> tuple[BlockConfig, Step]:
    torch.manual_seed(0)
    target = load_target("debug")
    options = DrafterConfig(context=context, block_size=3, taps=2, markov_rank=0)
    config = from_target(target, options, None).config
    texts = [torch.randint(3, target.vocab_size, (n,)) for n in (20, 31, 9, 14)]
    rows = packing.pack(data.from_lists(texts, [4] * 4, [1.0] * 4), 32, 0)[:2]
    return config, Step(*make_batch(rows, [0, 1], 12, 3, 0), keys=(5, 7))


def cache_of(target: Target, config: BlockConfig, memory: float) -> target_cache.TargetOutputCache:
    return target_cache.TargetOutputCache(target, config, TrainerConfig(keep_features_gb=memory))


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_same_numbers(context: str, temperature: float) -> None:
    config, step = scene(context)
    target = load_target("debug")
    anew = target_cache.compute_target_outputs(target, step, config, temperature)
    store = cache_of(target, config, 1.0)
    first, again = store.outputs(step, temperature), store.outputs(step, temperature)
    none = cache_of(target, config, 1e-9).outputs(step, temperature)
    for other in (again, none):
        assert all(torch.equal(a, b) for a, b in zip(vars_of(first), vars_of(other), strict=True))
    assert torch.equal(first.used_P, anew.used_P)
    for a, b in zip(vars_of(first), vars_of(anew), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("context", ["shared_kv", "taps"])
def test_tokens_of_p_in_place_of_all(context: str, tmp_path: Path) -> None:
    """What the drafter does not read of the last hidden state is not stored; losses are nearly those of all of p."""
    config, step = scene(context)
    target = load_target("debug")
    options = TrainerConfig(features_gb=1.0, features_top_k=40, features_dtype="fp32")
    cache = target_cache.TargetOutputCache(target, config, options, tmp_path)
    outputs = cache.outputs(step, 1.0)
    cache.close()
    stored = target_cache.TargetOutputCache(target, config, options, tmp_path)
    stored.run = None  # type: ignore[assignment]
    again, all_of_p = stored.outputs(step, 1.0), cache_of(target, config, 1.0).outputs(step, 1.0)
    assert outputs.features.hidden_BLD.shape[-1] == (0 if context == "taps" else target.hidden_size)
    assert (
        outputs.places.top is not None
        and again.places.top is not None
        and all_of_p.places.top is None
    )
    assert torch.equal(outputs.places.top.log_p_Pk, again.places.top.log_p_Pk)
    assert outputs.places.top.ids_Pk.shape == (len(outputs.used_P), 40)
    assert torch.equal(outputs.places.top.ids_Pk[:, 0], outputs.places.best_P.int())
    place_R = torch.arange(len(outputs.used_P))
    logits_RV = torch.randn(
        len(place_R), target.vocab_size, generator=torch.Generator().manual_seed(0)
    )
    few, whole = (
        logit_statistics(logits_RV, place_R, found.places, target.head_weight_VD)
        for found in (again, all_of_p)
    )
    missing = 1 - again.places.top.log_p_Pk.exp().sum(-1)
    lost = whole.acceptance - few.acceptance
    assert bool((lost > -1e-3).all()) and bool((lost < missing + 1e-3).all())
    assert torch.equal(few.match, whole.match)


def test_a_row_is_looked_at_once() -> None:
    config, step = scene("shared_kv")
    target, calls = load_target("debug"), []
    store, small = cache_of(target, config, 1.0), cache_of(target, config, 1e-9)
    for cache in (store, small):
        cache.run = lambda *a, run=cache.run: (calls.append(1), run(*a))[1]
    for _ in range(3):
        store.outputs(step, 1.0)
    assert len(calls) == 2
    store.missing = lambda mine: (
        True
    )  # another process lacks its rows: this one runs the target along with it
    store.outputs(step, 1.0)
    assert len(calls) == 4
    calls.clear()
    for _ in range(3):
        small.outputs(step, 1.0)
    assert len(calls) == 6


def vars_of(view: target_cache.TargetOutputs) -> list[torch.Tensor]:
    f, p = view.features, view.places
    taps = [] if f.taps_BLFD is None else [f.taps_BLFD]
    return [
        f.hidden_BLD,
        *f.keys,
        *f.values,
        *taps,
        p.hidden_PD,
        p.log_z_P,
        p.best_P,
        p.log_p_next_P,
        p.next_P,
    ]
