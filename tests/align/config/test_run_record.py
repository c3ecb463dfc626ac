"""The record of a run: its words, its resolved recipe, its versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.config.parser import load_recipe
from align.config.recipe_files import check_record, save_run_record
from specalign.common.errors import UserError


def test_a_run_goes_on_with_the_keys_that_it_began_with(tmp_path: Path) -> None:
    words = ["recipe=debug_block", f"output={tmp_path}"]
    other = [*words, "trainer.learning_rate=1e-2", "data.samples=70"]
    other += ["objective.terms={reverse_kl: 1}", "seed=4"]
    check_record(load_recipe(words))  # nothing there
    save_run_record(load_recipe(words), [])
    check_record(load_recipe(other))  # stopped before its first checkpoint: nothing to go on with
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/step-3.ckpt").touch()
    free = ["trainer.max_steps=99", "target.device=cpu", "launch.num_nodes=2"]
    check_record(load_recipe([*words, *free]))
    check_record(load_recipe([*other, "trainer.resume=never"]))
    says = "seed=0 there, 4 now; data.samples=48 there, 70 now; .* and 1 more.*resume=never"
    with pytest.raises(UserError, match=says):
        check_record(load_recipe(other))
    record = (tmp_path / "recipe.yaml").read_text()
    (tmp_path / "recipe.yaml").write_text("seed: 0\n")  # of a version that knew fewer keys
    check_record(load_recipe(other[:-1]))
    (tmp_path / "recipe.yaml").write_text(record + "\n: [")
    with pytest.raises(UserError, match="recipe.yaml: not valid YAML"):
        check_record(load_recipe(words))
