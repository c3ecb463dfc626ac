"""AdamW as a recipe asks for it: parts with rates of their own, and the rate of each step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from align.common.errors import UserError
from align.config.drafter import PARTS
from align.config.recipe import TrainerConfig

_OPTIONS = {
    "markov": "markov_rank",
    "convolution": "convolution",
    "self_conditioning": "self_conditioning",
    "confidence": "confidence_head",
}
"""The recipe's option that gives the drafter a part."""


def learning_rate(t: TrainerConfig, step: int, seconds: float) -> float:
    """Linear warm-up, then cosine to the least rate at max_steps, or at max_minutes where that comes first.

    A function of the steps taken and the seconds trained alone: a checkpoint that holds both needs no scheduler.
    """
    if step < t.warmup_steps:
        return t.learning_rate * (step + 1) / t.warmup_steps
    done = (step - t.warmup_steps) / max(1, t.max_steps - t.warmup_steps)
    if t.max_minutes is not None:
        done = max(done, seconds / (60 * t.max_minutes))
    low = t.min_learning_rate_ratio
    return t.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def adamw(trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig) -> torch.optim.Optimizer:
    """The optimizer of the weights that are trained, by name. Raises UserError as `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(trained, t) if t.learning_rates else list(trained.values()),
        lr=t.learning_rate,
        betas=(t.betas[0], t.betas[1]),
        weight_decay=t.weight_decay,
    )


def parameter_groups(trained: Mapping[str, torch.nn.Parameter], t: TrainerConfig) -> list[dict[str, Any]]:
    """The optimizer's groups: what takes `learning_rate`, then each part of `learning_rates`.

    Raises:
        UserError: the drafter lacks a part, or it is not trained.
    """
    groups: dict[str, list[torch.nn.Parameter]] = {"": [], **{part: [] for part in t.learning_rates}}
    for name, parameter in trained.items():
        own = (part for part in groups if part and PARTS[part] in name)
        groups[next(own, "")].append(parameter)
    for part, members in groups.items():
        if part and not members:
            raise UserError(
                f"trainer.learning_rates.{part}: no such part of the drafter is trained "
                f"(drafter.{_OPTIONS[part]})"
            )
    return [{"params": members, "part": part} for part, members in groups.items() if members]
