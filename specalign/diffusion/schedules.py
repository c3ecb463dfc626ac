"""Noise schedules σ(t), the total noise at a time t in [0, 1].

The formulas are those of SEDD (arXiv 2310.16834) and MDLM (arXiv 2406.07524).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specalign.common.errors import UserError, nearest
from specalign.common.schema import finite


@dataclass(frozen=True)
class Schedule(ABC):
    """σ(t) = `total`, dσ/dt = `rate`, and `time`, the t at which σ(t) = `sigma`; elementwise, in
    the dtype and on the device of their argument."""

    @abstractmethod
    def total(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def rate(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def time(self, sigma: Tensor) -> Tensor: ...

    def mask_probability(self, t: Tensor) -> Tensor:
        """1 − e^(−σ(t)): the probability that a token is masked; λ in RADD (arXiv 2406.03736)."""
        return -torch.expm1(-self.total(t))

    def weight(self, t: Tensor) -> Tensor:
        """dσ/(e^σ − 1): the weight of a masked position's loss (MDLM); 1/t for log-linear noise."""
        return self.rate(t) / torch.expm1(self.total(t))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """σ(t) = −log(1 − (1−eps)·t): the masked share grows linearly up to 1 − eps."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 < self.eps < 1:
            raise UserError(f"schedule: eps={self.eps} must be within 0 and 1, both excluded")

    def total(self, t: Tensor) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * t)

    def rate(self, t: Tensor) -> Tensor:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)

    def time(self, sigma: Tensor) -> Tensor:
        return -torch.expm1(-sigma) / (1 - self.eps)


@dataclass(frozen=True)
class Geometric(Schedule):
    """σ(t) = sigma_min^(1−t) · sigma_max^t; the defaults are SEDD's."""

    sigma_min: float = 1e-4
    sigma_max: float = 20.0

    def __post_init__(self) -> None:
        if not 0 < self.sigma_min < self.sigma_max < math.inf:
            given = f"sigma_min={self.sigma_min}, sigma_max={self.sigma_max}"
            raise UserError(f"schedule: {given}: needs 0 < sigma_min < sigma_max")

    @property
    def _growth(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def total(self, t: Tensor) -> Tensor:
        return self.sigma_min * torch.exp(self._growth * t)

    def rate(self, t: Tensor) -> Tensor:
        return self._growth * self.total(t)

    def time(self, sigma: Tensor) -> Tensor:
        return torch.log(sigma / self.sigma_min) / self._growth


SCHEDULES: dict[str, type[Schedule]] = {"loglinear": LogLinear, "geometric": Geometric}


def schedule(name: str, **options: float) -> Schedule:
    """The schedule of that name with its options. Raises UserError for an unknown name or option,
    a value out of range."""
    if name not in SCHEDULES:
        raise UserError(f"schedule {name!r} is unknown{nearest(name, SCHEDULES)}")
    known = [field.name for field in fields(SCHEDULES[name])]
    for option, value in options.items():
        if option not in known or not finite(value):
            raise UserError(f"schedule {name}: {option}={value!r} is not a number of {known}")
    return SCHEDULES[name](**options)
