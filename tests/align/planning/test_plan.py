"""What does not fit is said, with the key to change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from align.config.parser import load_recipe
from align.planning.hardware import named_hardware
from align.planning.plan import add_hours, make_plan

SMALL = replace(named_hardware("h100"), memory=1e9)


def test_what_fits_says_nothing() -> None:
    plan = make_plan(load_recipe(["recipe=debug_block"]), named_hardware("h100"))
    assert plan.misfits == [] and plan.seconds is None
    add_hours(plan, 0.3)
    assert plan.seconds is not None and plan.seconds.training > 0
    assert any("starting them takes longer" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["data.batch_size=32768"], "data.batch_size=16384"),
        (["trainer.batch_size=8192"], "trainer.accumulate=2"),
        (
            ["data.length=16384", "trainer.batch_size=1", "trainer.anchors=4096"],
            "trainer.anchors=2048 or data.length=8192",
        ),
    ],
)
def test_what_does_not_fit_names_the_key(words: list[str], key: str) -> None:
    plan = make_plan(load_recipe(["recipe=debug_block", *words]), SMALL)
    assert any(key in misfit.line for misfit in plan.misfits), plan.misfits


def test_samples_longer_than_the_context_are_said() -> None:
    plan = make_plan(
        load_recipe(["recipe=debug_block", "data.max_answer_tokens=5000"]), named_hardware("h100")
    )
    assert any(
        "context of 512" in misfit.line and "data.max_answer_tokens" in misfit.line for misfit in plan.misfits
    )


def test_devices_that_stand_idle_are_said() -> None:
    plan = make_plan(load_recipe(["recipe=debug_block"]), named_hardware("h100x8"))
    assert any("launch.devices=8" in note for note in plan.notes)
    assert make_plan(load_recipe(["recipe=debug_block"]), named_hardware("h100")).notes == []


def test_plain_values_hold_all_of_it() -> None:
    plan = make_plan(load_recipe(["recipe=debug_taps"]), named_hardware("a100"))
    add_hours(plan, 0.3)
    values = plan.as_dict()
    assert values["memory_bytes"]["training"] == next(
        need.bytes for need in plan.needs if need.stage == "training"
    )
    assert values["target"]["parameters"] == plan.target.parameters and values["seconds"]["how"].startswith(
        "30%"
    )


def test_training_that_minutes_end_takes_no_longer() -> None:
    words = ["recipe=debug_taps", "trainer.max_steps=100000000"]
    whole, ended = (
        make_plan(load_recipe([*words, *more]), named_hardware("a100"))
        for more in ([], ["trainer.max_minutes=0.5"])
    )
    for plan in (whole, ended):
        add_hours(plan, 0.3)
    assert whole.seconds is not None and whole.seconds.training > 30
    assert ended.seconds is not None and ended.seconds.training == 30
    assert any("trainer.max_minutes=0.5 ends training" in note for note in ended.notes)
