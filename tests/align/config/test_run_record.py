"""The record of a run: its words, its resolved recipe, its versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from align.common.errors import UserError
from align.config.parser import load_recipe, save_run_record


def test_the_run_record(tmp_path: Path) -> None:
    recipe = load_recipe(["recipe=debug_block", "seed=3"])
    save_run_record(recipe, tmp_path / "run", ["recipe=debug_block", "seed=3"])
    assert load_recipe([f"recipe={tmp_path}/run/recipe.yaml"]) == recipe
    record = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert record["argv"] == ["recipe=debug_block", "seed=3"]
    assert {"python", "torch", "transformers", "lightning", "deepspeed", "datasets", "git_commit"} <= set(
        record
    )
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["recipe.yaml", "versions.json"]
    with pytest.raises(UserError, match="output=.*can't be written"):
        save_run_record(recipe, tmp_path / "run" / "recipe.yaml" / "below", [])
