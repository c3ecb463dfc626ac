"""Kept views of the target: the same numbers as looking anew, whatever the room, and far fewer forwards."""

from __future__ import annotations

import pytest
import torch

from align.config.drafter import DrafterConfig
from align.config.trainer import TrainerConfig
from align.data import packing
from align.data import shards as data
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


def test_a_row_is_looked_at_once() -> None:
    config, step = scene("shared_kv")
    target, calls = load_target("debug"), []
    store, small = cache_of(target, config, 1.0), cache_of(target, config, 1e-9)
    for cache in (store, small):
        cache.run = lambda *a, run=cache.run: (calls.append(1), run(*a))[1]
    for cache, count in ((store, 2), (small, 2 + 6)):
        for _ in range(3):
            cache.outputs(step, 1.0)
        assert len(calls) == count


def vars_of(view: target_cache.TargetOutputs) -> list[torch.Tensor]:
    f, p = view.features, view.places
    taps = [] if f.taps_BLFD is None else [f.taps_BLFD]
    places = [p.hidden_PD, p.log_z_P, p.best_P, p.log_p_next_P, p.next_P]
    return [f.hidden_BLD, *f.keys, *f.values, *taps, *places]
