"""Planned bytes: parts that can be counted are counted, and what grows with a key names that key."""

from __future__ import annotations

import pytest
import torch

from align.config.parser import load_recipe
from align.data.supply import open_supply
from align.outputs.row import compute_row
from align.planning.drafter import drafter_size
from align.planning.memory import (
    Types,
    anchors_used,
    disk,
    feature_bytes,
    features,
    training,
    writing,
)
from align.planning.skeleton import skeleton
from align.planning.text import text_size
from align.target.loading import load_target
from align.training.build import conditioning

FP32 = Types(4, 4, 4, False)


def needs(*words: str, types: Types = FP32):
    recipe = load_recipe(["recipe=debug_block", "output=nowhere", *words])
    target = skeleton("debug")
    return training(recipe, target, drafter_size(recipe, target), text_size(recipe), types)


def test_weights_gradients_and_averages_are_counted() -> None:
    recipe, target = load_recipe(["recipe=debug_block"]), skeleton("debug")
    size = drafter_size(recipe, target)
    parts = needs().parts
    assert parts["target"] == 4 * target.parameters
    assert parts["gradients"] == 4 * size.trained and parts["optimizer"] == 8 * size.trained
    assert parts["a checkpoint"] == 12 * size.trained
    assert needs("trainer.ema=0.9").parts["averaged weights"] == 4 * size.parameters


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_splits_what_it_splits(stage: int) -> None:
    words = (f"launch.strategy=deepspeed_{stage}", "launch.devices=2")
    whole, split = needs().parts, needs(*words).parts
    assert split["optimizer"] == whole["optimizer"] / 2
    assert split["gradients"] == whole["gradients"] / (2 if stage > 1 else 1)
    assert needs("launch.devices=2").parts["gradients"] == 2 * whole["gradients"]  # DDP's buckets


def test_fsdp_splits_all_and_a_target_in_parts_its_layers() -> None:
    words = ("launch.devices=2", "trainer.ema=0.9")
    whole, split = needs("trainer.ema=0.9").parts, needs(*words, "launch.strategy=fsdp").parts
    for part in ("optimizer", "gradients", "averaged weights"):
        assert split[part] == whole[part] / 2
    shared = needs(*words, "target.parallel=tp").parts["target"]
    layers = 4 * sum(skeleton("debug").layers)
    assert shared == whole["target"] - layers / 2
    assert needs(*words, "target.parallel=fsdp").parts["target"] > shared


def test_more_of_a_step_takes_more() -> None:
    key = "a step (trainer.batch_size)"
    small = needs().parts[key]
    assert needs("trainer.batch_size=4").parts[key] > 1.9 * small
    assert needs("trainer.batch_size=4", "trainer.accumulate=2").parts[key] == small
    assert needs("trainer.anchors=4").parts[key] < small < needs("data.length=192").parts[key]


@pytest.mark.parametrize("name", ["debug_mdlm", "debug_sedd", "debug_autoregressive", "debug_taps"])
def test_every_kind_has_a_plan(name: str) -> None:
    recipe, target = load_recipe([f"recipe={name}"]), skeleton("debug")
    size = drafter_size(recipe, target)
    for types in (FP32, Types(2, 2, 2, True)):
        found = training(recipe, target, size, text_size(recipe), types)
        assert found.bytes == sum(found.parts.values()) > 4 * size.parameters
        assert features(recipe, target, size, types).bytes > 0
    assert writing(recipe, target, FP32).parts["cache (data.batch_size)"] == 16 * (40 + 24 + 40) * 256 * 4
    assert 0 < anchors_used(recipe, text_size(recipe)) <= recipe.trainer.anchors


@pytest.mark.parametrize("top_k", [0, 8])
@pytest.mark.parametrize("name", ["debug_block", "debug_taps", "debug_mdlm"])
def test_stored_outputs_have_the_planned_size(name: str, top_k: int, debug_data) -> None:
    words = [f"recipe={name}", f"data.path={debug_data}", "trainer.features_gb=1"]
    recipe, target = load_recipe([*words, f"trainer.features_top_k={top_k}"]), load_target("debug")
    row = open_supply(recipe, target, quiet=True).stream(recipe)
    from align.data.packing import collate

    stored = compute_row(
        target, collate([row.row(row.key(0))]), conditioning(recipe, target), 1.0, torch.float16, top_k=top_k
    )
    bare = skeleton("debug")
    assert stored.bytes == recipe.data.length * feature_bytes(recipe, bare, drafter_size(recipe, bare))


def test_disk_holds_one_checkpoint_more_than_are_kept() -> None:
    recipe, target = load_recipe(["recipe=debug_block", "trainer.keep_checkpoints=1"]), skeleton("debug")
    size = drafter_size(recipe, target)
    found = disk(recipe, target, size, text_size(recipe))
    assert found.checkpoints == 2 * 12 * size.trained and found.features == 0
    assert found.bytes == found.text + found.checkpoints + found.drafter
