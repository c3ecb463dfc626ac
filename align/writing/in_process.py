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
        prefix, ends = plan.template.prefix, plan.prompt_ends
        self.writer = Writer(target, prefix, plan.turn, ends, plan.settings, plan.capacity)

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        rows = self.plan.rows(number)
        if not rows:
            return None
        generator = torch.Generator().manual_seed(batch_seed(self.plan.recipe.seed, number))
        left = [row for row in rows if not row.done]
        while left:
            self.writer.write(left, generator, progress)
            left = [row for row in left if self.plan.advance(row)]
        return rows

    def forget(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass
