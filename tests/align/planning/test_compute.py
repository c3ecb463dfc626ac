"""Operations: as torch counts them, and seconds that follow from them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from align.config.parser import load_recipe
from align.planning.compute import Work, forward, rows_trained, stated_seconds, work
from align.planning.drafter import drafter_size
from align.planning.hardware import named_hardware
from align.planning.memory import Types
from align.planning.skeleton import skeleton
from align.planning.text import TextSize
from align.target.loading import load_target
from align.training.build import KINDS
from align.training.optimizer import make_optimizer, orthogonal

TEXT = TextSize(100, 0, 50.0)


def test_the_targets_forward_is_what_torch_counts() -> None:
    """Its counter knows no attention of a CPU; the products are all others."""
    target = load_target("debug", fast=False)
    with FlopCounterMode(display=False) as counter:
        target.forward(torch.zeros(1, 64, dtype=torch.int64), logits=False)
    assert forward(skeleton("debug"), 64, 0) == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize(
    "name", ["debug_block", "debug_taps", "debug_mdlm", "debug_sedd", "debug_autoregressive"]
)
def test_more_text_is_more_work(name: str) -> None:
    recipe, target = load_recipe([f"recipe={name}"]), skeleton("debug")
    size = drafter_size(recipe, target)
    found = work(recipe, target, size, TEXT)
    longer = load_recipe([f"recipe={name}", "data.length=192"])
    assert 0 < found.step_row < work(longer, target, size, TEXT).step_row
    assert found.row < work(longer, target, size, TEXT).row


def test_kept_outputs_save_the_target() -> None:
    words = ["recipe=debug_block", "trainer.max_steps=500"]
    every, fresh = rows_trained(load_recipe(words), TEXT)
    assert (every, fresh) == (1000, 1000)
    every, fresh = rows_trained(load_recipe([*words, "trainer.keep_features_gb=1"]), TEXT)
    assert (every, fresh) == (1000, TEXT.rows(96))


@pytest.mark.parametrize("name", ["debug_block", "debug_mdlm", "debug_sedd", "debug_autoregressive"])
def test_muon_moves_matrices_in_every_process(name: str) -> None:
    words, target = [f"recipe={name}"], skeleton("debug")
    recipe = load_recipe([*words, "trainer.optimizer=muon"])
    size, one = drafter_size(recipe, target), named_hardware("h100")
    plain, found = (work(r, target, size, TEXT) for r in (load_recipe(words), recipe))
    assert plain.step == 0
    with FlopCounterMode(display=False) as counter:
        for shape in size.matrices:
            orthogonal(torch.randn(shape), torch.float32)
    assert found.step == counter.get_total_flops() > 0
    types = Types(2, 2, 2, True)
    less, more = (stated_seconds(recipe, target, TEXT, w, types, one, 0.5) for w in (plain, found))
    assert more.training - less.training == pytest.approx(
        recipe.trainer.max_steps * found.step / (0.5 * 989.4e12), rel=1e-3
    )


@pytest.mark.parametrize("name", ["debug_block", "debug_sedd", "debug_autoregressive"])
def test_muons_matrices_are_those_that_it_moves(name: str) -> None:
    recipe = load_recipe([f"recipe={name}", "trainer.optimizer=muon"])
    kind = KINDS[recipe.drafter.kind]
    target = load_target("debug", fast=False)
    drafter = kind.make(target, recipe, None)
    trained = {n: p for n, p in drafter.named_parameters() if p.requires_grad}
    moved = make_optimizer(trained, recipe.trainer).param_groups[-1]["params"]
    assert sorted(drafter_size(recipe, skeleton("debug")).matrices) == sorted(tuple(p.shape) for p in moved)


def test_seconds_follow_from_peaks() -> None:
    recipe, target = load_recipe(["recipe=debug_block"]), skeleton("debug")
    one, work_of = named_hardware("h100"), Work(1e12, 1e12, 1e12)
    found = stated_seconds(recipe, target, TEXT, work_of, Types(2, 2, 2, True), one, 0.5)
    assert found.writing == pytest.approx(100 * 1e12 / (0.5 * 989.4e12))
    faster = stated_seconds(recipe, target, TEXT, work_of, Types(2, 2, 2, True), one, 1.0)
    assert faster.training == pytest.approx(found.training / 2)
