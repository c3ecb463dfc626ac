"""The rate and the rows of every step, also of a run that resumes under other settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.trainer import TrainerConfig
from align.training.base_module import DrafterModule
from align.training.checkpoints import Seal, read_seal
from align.training.run import train
from align.training.schedule import (
    Schedule,
    describe_change,
    first_schedule,
    learning_rate,
    resume_schedule,
)
from tests.builders import train_debug_block as run


def test_the_learning_rate_rises_falls_and_stays_at_its_least() -> None:
    t = TrainerConfig(
        max_steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.2
    )
    assert [learning_rate(t, step, 0.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(t, 60, 0.0) == pytest.approx(0.6)  # half of the cosine
    assert learning_rate(t, 110, 0.0) == learning_rate(t, 500, 0.0) == pytest.approx(0.2)
    t.max_minutes = 1.0  # whichever comes first
    assert learning_rate(t, 20, 30.0) == pytest.approx(0.6) and learning_rate(
        t, 20, 90.0
    ) == pytest.approx(0.2)


def seal_of(schedule: Schedule, step: int) -> Seal:
    record = schedule.record
    return Seal(
        step=step, seconds=0.0, target_sha256="", drafter={}, draft_vocab=None, schedule=record
    )


def continued(schedule: Schedule, step: int, *words: str) -> Schedule:
    """The schedule of a run that stopped after `step` steps and resumes with other words."""
    return resume_schedule(load_recipe(["recipe=debug_block", *words]), seal_of(schedule, step))


def test_a_run_that_does_not_change_keeps_its_rates_to_the_bit() -> None:
    recipe = load_recipe(["recipe=debug_block"])
    first = first_schedule(recipe)
    rates = [first.rate_at(step, 0.0) for step in range(12)]
    assert rates == [learning_rate(recipe.trainer, step, 0.0) for step in range(12)]
    again = resume_schedule(recipe, seal_of(first, 5))
    assert again == first and describe_change(again, seal_of(first, 5)) is None


@pytest.mark.parametrize(
    "words",
    [["trainer.max_steps=24"], ["trainer.max_steps=120"], ["trainer.max_steps=24", "trainer.learning_rate=0.01"],
     ["trainer.max_steps=24", "trainer.warmup_steps=0"]],
)  # fmt: skip
def test_the_rate_does_not_jump_where_a_run_continues(words: list[str]) -> None:
    first = first_schedule(load_recipe(["recipe=debug_block"]))
    now = continued(first, 12, *words)
    rates = [first.rate_at(step, 0.0) for step in range(12)] + [
        now.rate_at(step, 0.0) for step in range(12, now.trainer.max_steps)
    ]
    climb = max(now.rate_at(now.step + now.warmup, 0.0) - rates[11], 0.0)
    assert now.warmup >= 1 and rates[-1] < max(rates[12:])
    assert all(
        b - a <= climb / now.warmup + 1e-12 for a, b in zip(rates[11:], rates[12:], strict=False)
    )
    note = describe_change(now, seal_of(first, 12)) or ""
    assert (
        all(word in note for word in words)
        and "(was " in note
        and "the learning rate moves from" in note
    )


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_every_row_is_read_once_where_the_batch_size_changes(before: int, after: int) -> None:
    first = first_schedule(load_recipe(["recipe=debug_block", f"trainer.batch_size={before}"]))
    now = continued(first, 6, f"trainer.batch_size={after}")
    assert now.rows_before(6) == 6 * before and now.rows_before(7) == 6 * before + after
    assert f"row {6 * before}" in (describe_change(now, seal_of(first, 6)) or "")


def test_where_other_text_ends_does_not_move() -> None:
    words = ["data.text=docs", "data.text_share=0.5"]
    first = first_schedule(load_recipe(["recipe=debug_block", *words]))
    assert first.text_rows == 12
    assert continued(first, 12, *words, "trainer.max_steps=24").text_rows == 12


def test_a_run_resumes_with_the_row_after_the_last_one(
    tmp_path: Path,
    debug_data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[int] = []
    step = DrafterModule.on_train_batch_start

    def record(module: DrafterModule, batch: Any, index: int) -> None:
        read.extend(batch.places)
        step(module, batch, index)

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", record)
    run(tmp_path, debug_data, "trainer.max_steps=2", "trainer.batch_size=4")
    checkpoint = tmp_path / "checkpoints" / "step-2.ckpt"
    more = ["trainer.max_steps=5", "trainer.batch_size=2", f"trainer.resume={checkpoint}"]
    words = ["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"]
    train(load_recipe([*words, *more]))
    assert read == [*range(14)]
    said = capsys.readouterr().err
    assert (
        said.count("note: resumes with") == 1
        and "trainer.batch_size=2 (was 4)" in said
        and "row 8" in said
    )
    seal = read_seal(tmp_path / "checkpoints" / "step-5.ckpt")
    assert Schedule(**(seal.schedule or {})).rows_before(5) == 14
