"""The rate and the rows of every step, also of a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.config.trainer import TrainerConfig
from align.training.base_module import DrafterModule
from align.training.run import train
from align.training.schedule import learning_rate
from specalign.common.errors import UserError
from tests.builders import train_debug_block as run


def test_the_learning_rate_rises_falls_and_stays_at_its_least() -> None:
    t = TrainerConfig(
        max_steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.2
    )
    assert [learning_rate(t, step, 0.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(t, 60, 0.0) == pytest.approx(0.6)  # half of the cosine
    assert learning_rate(t, 110, 0.0) == learning_rate(t, 500, 0.0) == pytest.approx(0.2)
    t.max_minutes = 1.0  # whichever comes first
    rates = [learning_rate(t, 20, seconds) for seconds in (30.0, 90.0)]
    assert rates == [pytest.approx(0.6), pytest.approx(0.2)]


def test_a_run_resumes_with_the_row_after_the_last_one(
    tmp_path: Path, debug_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    step = DrafterModule.on_train_batch_start

    def record(module: DrafterModule, batch: Any, index: int) -> None:
        read.extend(batch.places)
        step(module, batch, index)

    monkeypatch.setattr(DrafterModule, "on_train_batch_start", record)
    run(tmp_path, debug_data, "trainer.max_steps=2", "trainer.batch_size=4")
    checkpoint = tmp_path / "checkpoints" / "step-2.ckpt"
    words = ["recipe=debug_block", f"output={tmp_path}", f"data.path={debug_data}"]
    words += ["trainer.max_steps=3", f"trainer.resume={checkpoint}"]
    train(load_recipe([*words, "trainer.batch_size=4"]), quiet=True)
    assert read == [*range(12)]
    with pytest.raises(UserError, match="saved under trainer.batch_size=4; give the same"):
        train(load_recipe([*words, "trainer.batch_size=2"]), quiet=True)
