"""A recipe's defaults are the dataclasses' own, and what is resolved gives the same recipe again."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.common.strict_yaml import dump_yaml
from align.config.parser import load_recipe, shipped
from align.config.recipe import Recipe, keys, resolve
from tests.builders import needed_words as needed
from tests.builders import write_recipe as write


def test_defaults_are_the_dataclasses_own(tmp_path: Path) -> None:
    recipe = load_recipe([write(tmp_path, "mine.yaml", "seed: 0\n")])
    assert recipe == Recipe(name="mine", output="runs/mine")


@pytest.mark.parametrize("name", shipped())
def test_the_resolved_recipe_gives_the_same_recipe_again(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(
        [f"recipe={name}", *needed(name), "objective.terms.streak=1e-5", "output=1e3", "target.revision=010"]
    )
    again = load_recipe([write(tmp_path, "again.yaml", dump_yaml(resolve(recipe)))])
    assert again == recipe
    assert {f"{g}.{k}" for g, v in resolve(recipe).items() if isinstance(v, dict) for k in v} < set(keys())
