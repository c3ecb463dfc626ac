"""What a model does to its head's product before it is a logit: a scale, a cap. It is part of p.

The values stand in configs under many names, and one name is a factor here and a divisor there. So the form is chosen by
what the model itself gives (`align.target.proof`), never by its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
CAPS = ("final_logit_softcapping", "logits_soft_cap")


@dataclass(frozen=True)
class LogitForm:
    """logits = cap·tanh(scale·x / cap) of the head's product x, its bias included."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, product: Tensor) -> Tensor:
        if self.scale != 1.0:
            product = product * self.scale
        return product if self.cap is None else self.cap * torch.tanh(product / self.cap)


PLAIN = LogitForm()


def candidates(config: Any) -> Iterator[LogitForm]:
    """The forms that a config's values allow, the plain one first."""
    scales: list[float] = [1.0]
    caps: list[float | None] = [None]
    for name in SCALES:
        if value := _number(config, name):
            scales += [value, 1.0 / value]
    caps += [value for name in CAPS if (value := _number(config, name))]
    for cap in caps:
        for scale in dict.fromkeys(scales):
            yield LogitForm(scale, cap)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
