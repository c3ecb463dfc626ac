"""Batches that the target writes in this process, all rows of one together."""

from __future__ import annotations

import torch

from align.target.model import Target
from align.writing.generation import Row, Writer
from align.writing.rows import Plan, Progress, batch_seed


class InProcess:
    """The source of rows where there is no server.

    Args:
        target: p, the plan's target with its weights.
    """

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan, self.about = plan, dict[str, str]()
        t = plan.template
        self.writer = Writer(target, t.prefix, t.turn, plan.settings, plan.capacity)

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        rows = self.plan.rows(number)
        if not rows:
            return None
        seed = batch_seed(self.plan.recipe.seed, number)
        self.writer.write(rows, torch.Generator().manual_seed(seed), progress)
        return rows

    def forget(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
