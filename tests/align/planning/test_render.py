"""The page that people read."""

from __future__ import annotations

import re

import pytest

from align.config.parser import load_recipe
from align.planning.hardware import named_hardware
from align.planning.plan import add_hours, make_plan
from align.planning.render import amount, hours, render


@pytest.mark.parametrize(
    ("number", "text"),
    [(42_816, "42.8k"), (1_000_000, "1.00M"), (999_999, "1.00M"), (7, "7"), (134_515_008, "135M")],
)
def test_amounts(number: float, text: str) -> None:
    assert amount(number) == text


def test_units() -> None:
    assert (amount(74e12, "FLOP"), hours(30), hours(600), hours(9000)) == (
        "74.0 TFLOP",
        "30 s",
        "10 min",
        "2.5 h",
    )


def test_the_page_has_everything() -> None:
    plan = make_plan(load_recipe(["recipe=debug_block"]), named_hardware("h100"))
    add_hours(plan, 0.25)
    page = render(plan, 2.5)
    for word in ("debug (llama) on 1 × NVIDIA H100", "42.8k parameters", "writing", "training", "25% of the stated peak", "disk",
                 "expected τ", "a guess: every run had", "device-hours at 2.5", "everything fits"):  # fmt: skip
        assert word in page, page


def test_the_page_says_when_storing_pays() -> None:
    def page(*words: str) -> str:
        return render(make_plan(load_recipe(["recipe=debug_block", *words]), named_hardware("h100")))

    many = ("data.samples=40", "trainer.max_steps=400", "trainer.keep_features_gb=0")
    said = r"rows are read \d+\.\d times: trainer\.features_gb=1 would save \d\d% of training's operations"
    assert re.search(said, page(*many))
    assert "would save" not in page(*many, "trainer.features_gb=1")
    assert "would save" not in page("data.samples=40", "trainer.max_steps=400", "trainer.keep_features_gb=1")
    once = page(
        "data.samples=100000", "trainer.max_steps=10", "trainer.warmup_steps=1", "trainer.features_gb=1"
    )
    assert "they save nothing" in once and "would save" not in once


def test_a_misfit_is_loud() -> None:
    plan = make_plan(
        load_recipe(["recipe=debug_block", "data.max_answer_tokens=5000"]), named_hardware("h100")
    )
    assert "DOES NOT FIT: data.max_prompt_tokens" in render(plan)
