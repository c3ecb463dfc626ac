"""A pilot writes and trains with the run's own code, and leaves nothing behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.planning.pilot import run_pilot, scale_seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["recipe=debug_mdlm"],
        ["recipe=debug_block", "trainer.keep_features_gb=1", "launch.devices=2"],
    ],
)
def test_a_pilot(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    words = [*words, f"output={tmp_path / 'run'}", "data.batch_size=24"]
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
