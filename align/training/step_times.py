"""Measured times of a pilot's training steps."""

from __future__ import annotations

import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback


class StepTimes(Callback):
    """Seconds of each step but the first, with the number of rows new to the target; of the last
    validation, and of saving."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.validation = self.saving = 0.0
        self.started = self.ended = 0.0
        self._seen: set[int] = set()
        self._fresh = self._since = self._validated = 0.0

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if batch_idx > 1:
            self.steps.append((now - self._since, int(self._fresh)))
        self.started = self.started or now
        self._since, self._fresh = now, len({*batch.keys} - self._seen)
        self._seen |= {*batch.keys}

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.steps.append((time.monotonic() - self._since, int(self._fresh)))
        self._validated = time.monotonic()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.ended = time.monotonic()
        self.validation = self.ended - self._validated

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.saving = time.monotonic() - self.ended
