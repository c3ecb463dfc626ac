"""Sizes from configs alone are those of the loaded target and of the drafter that the recipe makes."""

from functools import cache
from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.config.recipe_files import list_recipes
from align.planning.drafter_sizes import plan_drafter_sizes
from align.planning.target_sizes import read_target_sizes
from align.training.build import make_drafter
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from tests.target_models import tiny_model, tiny_target

load = cache(load_target)
OPTIONS = {
    "debug_block": ["drafter.convolution=true", "drafter.markov=gated"],
    "debug_mdlm": ["drafter.share_embedding=false"],
    "debug_confidence": ["drafter.markov=vanilla"],
}
RECIPES = [
    name for name in list_recipes() if name.startswith("debug") and name != "debug_adapt_taps"
]


@pytest.mark.parametrize("name", ["opt", "deepseek_v3", "dots3_note_text", "mamba2"])
def test_layers_and_caches_of_other_architectures(name: str, tmp_path: Path) -> None:
    tiny_model(name, 260).config.save_pretrained(tmp_path)
    found, target = read_target_sizes(str(tmp_path)), tiny_target(name)
    layers = (sum(p.numel() for p in layer.parameters()) for layer in target.layers)
    assert found.layers == tuple(layers)
    shapes = [shape for shape in target.anatomy.shapes if shape is not None]
    assert found.cached == sum(shape.numbers for shape in shapes)


@pytest.mark.parametrize("name", [*RECIPES, *(f"{name} +" for name in OPTIONS)])
def test_the_drafter_of_a_recipe(name: str) -> None:
    bare = name.removesuffix(" +")
    recipe = load_recipe([f"recipe={bare}", *(OPTIONS[bare] if bare != name else [])])
    target, vocab = load(recipe.target.name), None
    if recipe.drafter.kind == "block" and recipe.drafter.draft_vocab:
        vocab = torch.arange(4, 4 + recipe.drafter.draft_vocab)
    made = [*make_drafter(target, recipe.drafter, vocab, 0).parameters()]
    found = plan_drafter_sizes(recipe, read_target_sizes(recipe.target.name))
    assert found.parameters == sum(p.numel() for p in made)
    assert found.trained == sum(p.numel() for p in made if p.requires_grad)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("drafter.layers=9", r"drafter\.layers=9: target 'debug' has 4 layers"),
        ("drafter.init=nowhere/at/all", r"drafter\.init 'nowhere/at/all'"),
    ],
)
def test_options_that_do_not_fit_the_target(word: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan_drafter_sizes(load_recipe(["recipe=debug_block", word]), read_target_sizes("debug"))
