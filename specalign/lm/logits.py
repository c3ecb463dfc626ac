"""How a model turns its head's output into logits: a scale, a cap, tokens that it never generates.
It is part of p.

Configs name these values in many ways, and one name is a factor here and a divisor there. So the
form is selected by the model's own logits (`specalign.lm.proof`), never by its name.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

_SCALES = (
    "logit_scale", "logits_scaling", "logits_mup_width_multiplier", "lm_head_multiplier", "output_multiplier",
)  # fmt: skip
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
NEVER = -1e9
"""The logit of a token that is never written: a probability of 0, and finite in every sum."""


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


@dataclass(frozen=True, eq=False)
class Readout:
    """Turns the head's output into logits. never_V: tokens that the model never generates, bool."""

    form: LogitForm = PLAIN
    never_V: Tensor | None = None

    def __call__(self, product: Tensor, columns: Tensor | None = None) -> Tensor:
        """Logits of these columns of the product, None = all."""
        logits = self.form(product)
        if self.never_V is None:
            return logits
        return logits.masked_fill(self.never_V if columns is None else self.never_V[columns], NEVER)


def candidates(config: PreTrainedConfig) -> Iterator[LogitForm]:
    """The forms that a config's values allow, the plain one first."""
    scales = [1.0]
    for value in _numbers(config, _SCALES):
        scales += [value, 1.0 / value]
    for cap in (None, *_numbers(config, _CAPS)):
        for scale in dict.fromkeys(scales):
            yield LogitForm(scale, cap)


def _numbers(config: PreTrainedConfig, names: Sequence[str]) -> list[float]:
    """The config's values of these names that are numbers, not 0."""
    values = [getattr(config, name, None) for name in names]
    return [float(v) for v in values if v and type(v) in (int, float)]


def over_the_head(logits_LV: Tensor, size: int) -> tuple[Tensor, Tensor | None]:
    """A model's logits over all `size` columns of its head, fp32, and the tokens that it never
    writes, bool (size,), if any: those of the lowest number everywhere, and those left out."""
    lowest, width = torch.finfo(logits_LV.dtype).min, logits_LV.shape[1]
    if width < size:
        logits_LV = torch.nn.functional.pad(logits_LV, (0, size - width), value=lowest)
    never_V = (logits_LV <= lowest).all(0)
    logits_LV = logits_LV.float()
    if not bool(never_V.any()):
        return logits_LV, None
    return logits_LV.masked_fill(never_V, NEVER), never_V
