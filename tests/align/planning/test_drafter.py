"""The planned size of a drafter is that of the drafter which the recipe makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.config.parser import load_recipe, shipped
from align.makers.block import make_block
from align.models.checkpoints.block import save_drafter
from align.planning.drafter import drafter_size
from align.planning.skeleton import skeleton
from align.target.loading import load_target
from align.training.build import KINDS

OPTIONS = {
    "debug_block": ["drafter.convolution=true", "drafter.self_conditioning=true", "drafter.markov=gated"],
    "debug_mdlm": ["drafter.share_embedding=false"],
    "debug_confidence": ["drafter.markov=mlp"],
}


@pytest.mark.parametrize(
    "name",
    [n for n in shipped() if n.startswith("debug") and n != "debug_adapt_taps"] + [f"{n} +" for n in OPTIONS],
)
def test_sizes_are_those_of_the_drafter_that_is_made(name: str) -> None:
    bare = name.removesuffix(" +")
    recipe = load_recipe([f"recipe={bare}", *(OPTIONS[bare] if bare != name else [])])
    target, kind = load_target(recipe.target.name), KINDS[recipe.drafter.kind]
    vocab = (
        torch.arange(4, 4 + recipe.drafter.draft_vocab)
        if kind.chosen_vocabulary and recipe.drafter.draft_vocab
        else None
    )
    made = dict(kind.make(target, recipe, vocab).named_parameters())
    found = drafter_size(recipe, skeleton(recipe.target.name))
    assert found.parameters == sum(p.numel() for p in made.values())
    assert found.trained == sum(p.numel() for p in made.values() if p.requires_grad)


def test_what_does_not_fit_the_target_is_said() -> None:
    target = skeleton("debug")
    with pytest.raises(UserError, match=r"drafter\.layers=9: target 'debug' has 4 layers"):
        drafter_size(load_recipe(["recipe=debug_block", "drafter.layers=9"]), target)
    with pytest.raises(UserError, match=r"drafter\.init='nowhere/at/all'.*drafter\.init=FOLDER"):
        drafter_size(load_recipe(["recipe=debug_block", "drafter.init=nowhere/at/all"]), target)


def test_an_init_that_a_shipped_recipe_makes_has_that_recipes_size() -> None:
    """`drafter.init=runs/NAME/drafter` before NAME has run."""
    first = drafter_size(load_recipe(["recipe=smollm2_mdlm"]), target := skeleton("debug"))
    then = drafter_size(
        load_recipe(["recipe=smollm2_mdlm", "drafter.init=runs/smollm2_mdlm/drafter"]), target
    )
    assert then == first


def test_low_rank_updates_of_a_trained_drafter(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    target, words = load_target("debug"), ["recipe=debug_taps"]
    save_drafter(make_block(target, load_recipe(words).drafter, None), tmp_path)
    words += [f"drafter.init={tmp_path}", "drafter.lora_rank=2", "drafter.lora_targets=q_proj,fc"]
    made = dict(make_block(target, load_recipe(words).drafter, None).named_parameters())
    found = drafter_size(load_recipe(words), skeleton("debug"))
    assert found.parameters == sum(p.numel() for p in made.values())
    assert found.trained == sum(p.numel() for p in made.values() if p.requires_grad)
    with pytest.raises(UserError, match=r"drafter\.lora_targets"):
        drafter_size(load_recipe([*words[:-1], "drafter.lora_targets=nothing"]), skeleton("debug"))
