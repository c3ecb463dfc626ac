"""Means over anchors, with their standard errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Estimate:
    """A mean over anchors, its standard error, and the number of anchors."""

    mean: float
    error: float
    count: int

    @staticmethod
    def of(values: Tensor, texts: Tensor | None = None) -> Estimate:
        """From one value per anchor, (n,), and the text (any integer id) that each anchor lies in, (n,).

        Anchors of one text are correlated and overlap: with `texts` the error treats texts as independent (the linearised
        ratio of sums); without, anchors, which is optimistic.
        """
        count = values.numel()
        if count == 0:
            return Estimate(float("nan"), float("nan"), 0)
        wide = values.detach().double().flatten()
        off = wide - wide.mean()
        if texts is not None:
            group = texts.flatten().unique(return_inverse=True)[1]
            off = torch.zeros(int(group.max()) + 1, dtype=off.dtype, device=off.device).index_add_(
                0, group, off
            )
        units = off.numel()
        error = (
            float((off.square().sum() * units / (units - 1)).sqrt() / count)
            if units > 1
            else float("nan")
        )
        return Estimate(float(wide.mean()), error, count)
