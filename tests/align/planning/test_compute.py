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


def test_seconds_follow_from_peaks() -> None:
    recipe, target = load_recipe(["recipe=debug_block"]), skeleton("debug")
    one, work_of = named_hardware("h100"), Work(1e12, 1e12, 1e12)
    found = stated_seconds(recipe, target, TEXT, work_of, Types(2, 2, 2, True), one, 0.5)
    assert found.writing == pytest.approx(100 * 1e12 / (0.5 * 989.4e12))
    faster = stated_seconds(recipe, target, TEXT, work_of, Types(2, 2, 2, True), one, 1.0)
    assert faster.training == pytest.approx(found.training / 2)
