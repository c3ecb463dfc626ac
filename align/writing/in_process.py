"""Batches that the target writes in this process."""

from __future__ import annotations

import torch

from align.writing.generation import Writer
from align.writing.rows import Plan, Progress, Row, Source, batch_seed
from specalign.lm.model import Target


class InProcess(Source):
    """Rows that the plan's target writes in this process; `target` has its weights."""

    def __init__(self, plan: Plan, target: Target) -> None:
        self.plan = plan
        self.writer = Writer(target, plan)

    def write(self, number: int, needed: int, progress: Progress) -> list[Row] | None:
        rows = self.plan.rows(number)
        return self.write_rows(number, rows, progress) if rows else None

    def write_rows(self, number: int, rows: list[Row], progress: Progress) -> list[Row]:
        """Write the plan's rows of a batch to their ends."""
        generator = torch.Generator().manual_seed(batch_seed(self.plan.recipe.seed, number))
        remaining = [row for row in rows if not row.done]
        while remaining:
            self.writer.write(remaining, generator, progress)
            remaining = [row for row in remaining if self.plan.advance(row)]
        return rows
