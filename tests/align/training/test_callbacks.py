"""What is said after steps and validations, and when a step is saved."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.config.parser import load_recipe
from align.training import checkpoints
from align.training.base_module import Interrupted
from align.training.callbacks import CheckpointCallback


class Trainer:
    """Counts what is saved."""

    callbacks: list[Any] = []

    def __init__(self) -> None:
        self.global_step, self.should_stop, self.is_global_zero = 0, False, True
        self.callbacks: list[Any] = []
        self.strategy = SimpleNamespace(barrier=lambda: None)

    def save_checkpoint(self, path: str) -> None:
        Path(path).write_text("weights")


@pytest.fixture
def scene(tmp_path: Path) -> tuple[CheckpointCallback, Any, Any]:
    words = ["trainer.checkpoint_every=2", "trainer.validate_every=5", "trainer.keep_checkpoints=2"]
    recipe = load_recipe(["recipe=debug_block", f"output={tmp_path}", *words])
    config = SimpleNamespace(target_sha256="a", to_dict=dict)
    progress = SimpleNamespace(seconds=0.0, stopping=False, stop_wanted=False)
    drafter = SimpleNamespace(config=config, draft_vocab=None)
    module: Any = SimpleNamespace(recipe=recipe, progress=progress, drafter=drafter, text_rows=0)
    return CheckpointCallback(module), Trainer(), module


def saved(callback: CheckpointCallback) -> list[str]:
    return sorted(path.name for path in callback.folder.glob("*.ckpt"))


def test_every_second_step_is_saved_and_the_newest_two_stay(scene: Any) -> None:
    callback, trainer, module = scene
    for index in range(7):
        trainer.global_step = index + 1
        callback.on_train_batch_end(trainer, module, None, None, index)
        if trainer.global_step == 5:
            callback.on_validation_end(trainer, module)
    assert saved(callback) == ["step-4.ckpt", "step-6.ckpt"]
    seal = checkpoints.read_seal(callback.folder / "step-6.ckpt")
    assert (seal.step, seal.stage) == (6, "calibrate")
    module.progress.seconds, callback.options.max_minutes = 61.0, 1.0
    callback.on_train_batch_end(trainer, module, None, None, 7)
    assert trainer.should_stop  # after a last validation


def test_a_signal_is_remembered_saves_and_stops(scene: Any) -> None:
    callback, trainer, module = scene
    before = signal.getsignal(signal.SIGTERM)
    callback.on_train_start(trainer, module)
    signal.raise_signal(signal.SIGTERM)
    assert module.progress.stop_wanted
    module.progress.stopping, trainer.global_step = True, 3
    with pytest.raises(Interrupted, match="after step 3; a checkpoint is saved"):
        callback.on_train_batch_end(trainer, module, None, None, 2)
    callback.teardown(trainer, module, "fit")
    assert saved(callback) == ["step-3.ckpt"] and signal.getsignal(signal.SIGTERM) is before
