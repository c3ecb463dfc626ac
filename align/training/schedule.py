"""The learning rate of every step, and the share of other text."""

from __future__ import annotations

import math

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


def count_text_rows(recipe: Recipe, seal: Seal | None = None) -> int:
    """Packed rows of `data.text`, which a run reads first; a resumed run keeps its number."""
    t, d = recipe.trainer, recipe.data
    if seal is not None and "text_rows" in seal.schedule:
        return seal.schedule["text_rows"]
    return round(d.text_share * t.max_steps) * t.batch_size if d.text else 0
