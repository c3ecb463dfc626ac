"""The learning rate and the rows of every step, also of a run that resumed under other settings.

A checkpoint's seal records the schedule, so that a run that resumes repeatedly depends only on
recipe and checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from align.config.recipe import Recipe
from align.config.trainer import TrainerConfig
from align.training.checkpoints import Seal
from specalign.common.text import plural

_KEYS = (
    "max_steps", "max_minutes", "batch_size", "learning_rate", "min_learning_rate_ratio", "warmup_steps",
)  # fmt: skip
"""Keys of `trainer` that determine the rate and the rows of a step."""


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
class Schedule:
    """The part of a run that started with its present settings.

    settings: keys of `trainer`. text_rows: rows of `data.text` before the target's own. step, rows:
    optimizer steps and packed rows before this part. rate: the learning rate at its start; None =
    the run's beginning.
    """

    settings: dict[str, Any]
    text_rows: int = 0
    step: int = 0
    rows: int = 0
    rate: float | None = None

    @cached_property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(**self.settings)

    @property
    def record(self) -> dict[str, Any]:
        """The values to store in a seal."""
        return asdict(self)

    @property
    def row_offset(self) -> int:
        """Add it to step · batch_size for the first row of a step."""
        return self.rows - self.step * self.trainer.batch_size

    def rows_before(self, step: int) -> int:
        """Packed rows read before an optimizer step of this part."""
        return step * self.trainer.batch_size + self.row_offset

    @property
    def warmup(self) -> int:
        """Steps over which a resumed run approaches the new learning rate."""
        remaining = self.trainer.max_steps - self.step
        return min(max(self.trainer.warmup_steps, remaining // 10), remaining // 3)

    def rate_at(self, step: int, seconds: float) -> float:
        """The learning rate of a step after `seconds` of training; linear from the old rate to the
        new one after a change."""
        rate = learning_rate(self.trainer, step, seconds)
        passed = (step - self.step + 1) / (self.warmup + 1)
        if self.rate is None or passed >= 1:
            return rate
        return self.rate + (rate - self.rate) * passed


def first_schedule(recipe: Recipe) -> Schedule:
    """The schedule of a new run."""
    t, d = recipe.trainer, recipe.data
    text_rows = round(d.text_share * t.max_steps) * t.batch_size if d.text else 0
    return Schedule({key: getattr(t, key) for key in _KEYS}, text_rows)


def resume_schedule(recipe: Recipe, seal: Seal | None) -> Schedule:
    """The schedule in a seal, or one that continues it under the recipe's settings; a new one
    without any."""
    now = first_schedule(recipe)
    if seal is None or not seal.schedule:
        return now
    before = Schedule(**seal.schedule)
    if before.settings == now.settings:
        return before
    rate = before.rate_at(seal.step, seal.seconds)
    return Schedule(now.settings, before.text_rows, seal.step, before.rows_before(seal.step), rate)


def describe_change(now: Schedule, seal: Seal) -> str | None:
    """A note on how a resumed run differs from its checkpoint; None = it does not."""
    before = seal.schedule.get("settings", now.settings)
    changed = [key for key in _KEYS if before.get(key) != now.settings[key]]
    if not changed:
        return None
    keys = ", ".join(f"trainer.{k}={now.settings[k]} (was {before.get(k)})" for k in changed)
    final = now.rate_at(now.step + now.warmup, seal.seconds)
    steps = plural(now.warmup + 1, "step")
    rate = f"the learning rate moves from {now.rate or 0.0:.2g} to {final:.2g} over {steps}"
    rows = ""
    if "batch_size" in changed:
        rows = f"; training continues with row {now.rows:,} of the text"
    return f"note: resumes with {keys}: {rate}{rows}"
