"""The learning rate and the rows of every step, also of a run that resumed with another batch
size."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from align.config.recipe import Recipe
from align.config.trainer import TrainerConfig
from align.training.checkpoints import Seal


def learning_rate(t: TrainerConfig, step: int, seconds: float) -> float:
    """Linear warm-up, then cosine decay to the minimum at max_steps, or at max_minutes if that
    comes first.

    A function of the steps and the seconds trained, so that no scheduler has to be saved.
    """
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    done = (step - t.warmup_steps) / max(1, t.max_steps - t.warmup_steps)
    if t.max_minutes is not None:
        done = max(done, seconds / (60 * t.max_minutes))
    low = t.min_learning_rate_ratio
    return t.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


@dataclass(frozen=True)
class RowSchedule:
    """The rows that each step of a run reads; a checkpoint's seal records it.

    text_rows: rows of `data.text` before the target's own. step, rows: optimizer steps and packed
    rows before the part of the run with this batch size.
    """

    batch_size: int
    text_rows: int = 0
    step: int = 0
    rows: int = 0

    @property
    def record(self) -> dict[str, Any]:
        """The values to store in a seal."""
        return asdict(self)

    @property
    def offset(self) -> int:
        """Add it to step · batch_size for the first row of a step."""
        return self.rows - self.step * self.batch_size

    def rows_before(self, step: int) -> int:
        """Packed rows read before an optimizer step of this part."""
        return step * self.batch_size + self.offset


def schedule_rows(recipe: Recipe, seal: Seal | None = None) -> RowSchedule:
    """The schedule of a new run, or the one in a seal, continued with the recipe's batch size."""
    t, d = recipe.trainer, recipe.data
    if seal is None or "batch_size" not in seal.schedule:
        text_rows = round(d.text_share * t.max_steps) * t.batch_size if d.text else 0
        return RowSchedule(t.batch_size, text_rows)
    before = RowSchedule(**seal.schedule)
    if before.batch_size == t.batch_size:
        return before
    rows = before.rows_before(seal.step)
    return RowSchedule(t.batch_size, before.text_rows, seal.step, rows)
