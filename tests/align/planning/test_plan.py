"""A recipe's plan: text, memory, what does not fit, the page; and a pilot with the run's own code, which leaves nothing behind."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.data.packing import collate
from align.data.supply import open_supply
from align.outputs.cache import compute_row, count_bytes
from align.planning.drafter_sizes import plan_drafter_sizes
from align.planning.memory import feature_bytes
from align.planning.pilot import run_pilot, scale_seconds
from align.planning.plan import Hardware, TrainingPlan, find_hardware, make_plan, render_plan
from align.planning.target_sizes import read_target_sizes
from align.training.build import conditioning
from specalign.lm.loading import load_target

H100 = find_hardware("h100")
SMALL = replace(H100, memory=1e9)


def plan(*words: str, recipe: str = "debug_block", hardware: Hardware = H100) -> TrainingPlan:
    return make_plan(load_recipe([f"recipe={recipe}", "output=nowhere", *words]), hardware)


def training_parts(*words: str) -> dict[str, float]:
    return plan("target.dtype=float32", *words).stages["training"]


def test_weights_gradients_and_averages_are_counted() -> None:
    found = plan("target.dtype=float32")
    trained, parts = found.drafter.trained, found.stages["training"]
    assert parts["target"] == 4 * found.target.parameters
    assert (parts["gradients"], parts["optimizer"]) == (4 * trained, 8 * trained)
    assert training_parts("trainer.ema=0.9")["averaged weights"] == 4 * found.drafter.parameters


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_splits_what_it_splits(stage: int) -> None:
    whole = training_parts()
    split = training_parts(f"launch.strategy=deepspeed_{stage}", "launch.devices=2")
    assert split["optimizer"] == whole["optimizer"] / 2
    assert split["gradients"] == whole["gradients"] / (2 if stage > 1 else 1)
    buckets = training_parts("launch.devices=2")["gradients"]  # DDP's
    assert buckets == 2 * whole["gradients"]


@pytest.mark.parametrize("name", ["debug_mdlm", "debug_autoregressive", "debug_taps"])
def test_every_kind_has_a_plan(name: str) -> None:
    found = plan("trainer.keep_features_gb=1", recipe=name)
    writing, training = found.stages.values()
    assert writing["cache"] == 16 * (40 + 24 + 40) * 256 * 2
    assert sum(training.values()) > 4 * found.drafter.parameters
    assert 0 < training["kept outputs"] < 1e9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["debug_block", "debug_taps", "debug_mdlm"])
def test_stored_outputs_have_the_planned_size(name: str, debug_data: Path) -> None:
    words = [f"recipe={name}", f"data.path={debug_data}", "trainer.features_gb=1"]
    recipe, target = load_recipe(words), load_target("debug")
    stream = open_supply(recipe, target, quiet=True).stream(recipe, 0)
    batch = collate([stream.row(stream.key(0))])
    stored = compute_row(target, batch, conditioning(recipe.drafter, target), 1.0, torch.float16)
    sizes = read_target_sizes("debug")
    planned = feature_bytes(recipe, sizes, plan_drafter_sizes(recipe, sizes))
    assert count_bytes(stored) == recipe.data.length * planned


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["data.batch_size=32768"], "lower data.batch_size"),
        (["trainer.batch_size=8192"], "raise trainer.accumulate"),
    ],
)
def test_a_misfit_names_the_key_to_change(words: list[str], remedy: str) -> None:
    found = plan(*words, hardware=SMALL)
    assert any(remedy in line for line in found.misfits), found.misfits
    assert f"DOES NOT FIT: {found.misfits[0]}" in render_plan(found)


@pytest.mark.slow
def test_a_pilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(On one device: tests/align/test_plan.py.)"""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    words = ["recipe=debug_mdlm", "trainer.keep_features_gb=1", "launch.devices=2"]
    words += [f"output={tmp_path / 'run'}", "data.batch_size=24"]
    recipe = load_recipe(words)
    sample, step = run_pilot(recipe)
    assert recipe == load_recipe(words)
    assert not (tmp_path / "run").exists() and not list((tmp_path / "tmp").iterdir())
    assert sample > 0 and step > 0


def test_the_whole_run_is_scaled_by_counts() -> None:
    words = ["recipe=debug_block", "trainer.max_steps=100", "trainer.validate_every=50"]
    recipe = load_recipe([*words, "data.samples=40"])
    assert scale_seconds(recipe, 30, 7, 2)["writing"] == 10 * 7
    rows = recipe.trainer.validation_rows / recipe.trainer.batch_size
    assert scale_seconds(recipe, 50, 7, 2) == {"writing": 0, "training": (100 + 2 * rows) * 2}
    ended = load_recipe([*words, "trainer.max_minutes=0.5"])
    assert scale_seconds(ended, 40, 7, 2)["training"] == 30
