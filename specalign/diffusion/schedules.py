"""Noise schedules σ(t), the total noise at a time t in [0, 1], and the times of a training step.

The formulas are those of SEDD (arXiv 2310.16834) and MDLM (arXiv 2406.07524).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specalign.common.errors import UserError, nearest
from specalign.common.schema import finite

TIMES = ("uniform", "antithetic", "low_discrepancy")


@dataclass(frozen=True)
class Schedule(ABC):
    """σ(t) and what follows from it; every method is elementwise and keeps dtype and device."""

    @abstractmethod
    def total(self, t: Tensor) -> Tensor:
        """σ(t)."""

    @abstractmethod
    def rate(self, t: Tensor) -> Tensor:
        """dσ/dt."""

    @abstractmethod
    def time(self, sigma: Tensor) -> Tensor:
        """The t at which σ(t) = `sigma`, for σ(0) ≤ sigma ≤ σ(1)."""

    def mask_probability(self, t: Tensor) -> Tensor:
        """1 − e^(−σ(t)): the probability that a token is corrupted; λ in RADD (arXiv
        2406.03736)."""
        return -torch.expm1(-self.total(t))


@dataclass(frozen=True)
class LogLinear(Schedule):
    """σ(t) = −log(1 − (1−eps)·t): the masked share grows linearly up to 1 − eps."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

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
        if not self.sigma_min > 0:
            raise UserError(f"schedule: sigma_min={self.sigma_min} must be greater than 0")
        if not self.sigma_min < self.sigma_max < math.inf:
            raise UserError(
                f"schedule: sigma_max={self.sigma_max} must be finite and greater than "
                f"sigma_min={self.sigma_min}"
            )

    @property
    def _growth(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def total(self, t: Tensor) -> Tensor:
        return self.sigma_min * torch.exp(self._growth * t)

    def rate(self, t: Tensor) -> Tensor:
        return self._growth * self.total(t)

    def time(self, sigma: Tensor) -> Tensor:
        return torch.log(sigma / self.sigma_min) / self._growth


@dataclass(frozen=True)
class Cosine(Schedule):
    """σ(t) = −log(eps + (1−eps)·cos(πt/2)), MDLM's cosine, with 1 − cos(πt/2) = 2·sin²(πt/4)."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def total(self, t: Tensor) -> Tensor:
        return -torch.log1p(-2 * (1 - self.eps) * torch.sin(math.pi / 4 * t) ** 2)

    def rate(self, t: Tensor) -> Tensor:
        angle = math.pi / 2 * t
        scale = (1 - self.eps) * math.pi / 2
        return scale * torch.sin(angle) / (self.eps + (1 - self.eps) * torch.cos(angle))

    def time(self, sigma: Tensor) -> Tensor:
        return 4 / math.pi * torch.asin(torch.sqrt(-torch.expm1(-sigma) / (2 * (1 - self.eps))))


SCHEDULES: dict[str, type[Schedule]] = {
    "loglinear": LogLinear,
    "geometric": Geometric,
    "cosine": Cosine,
}


def schedule(name: str, **options: float) -> Schedule:
    """The schedule of that name with its options (`eps`, or `sigma_min` and `sigma_max`).

    Raises:
        UserError: an unknown name or option, a value out of range.
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule {name!r} is unknown{nearest(name, SCHEDULES)}")
    known = [field.name for field in fields(SCHEDULES[name])]
    for option, value in options.items():
        if option not in known:
            raise UserError(f"schedule {name}: unknown option {option!r}{nearest(option, known)}")
        if not finite(value):
            raise UserError(f"schedule {name}: {option}={value!r} must be a number")
    return SCHEDULES[name](**options)


def draw_times(
    count: int,
    how: str,
    generator: torch.Generator,
    least: float = 1e-3,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`count` times in [least, 1], (count,); each has a uniform distribution, whatever their joint
    one.

    Args:
        how: `uniform`: independent. `antithetic`: one in each of `count` equal strata as in MDLM,
            in random order. `low_discrepancy`: the van der Corput sequence in base 2, shifted by
            one draw (mod 1): consecutive times are spread out too.

    Raises:
        UserError: an unknown `how`, or a `least` outside [0, 1).
    """
    if how not in TIMES:
        raise UserError(f"times={how!r} is unknown{nearest(how, TIMES)}")
    place = generator.device
    u = torch.rand(
        1 if how == "low_discrepancy" else count,
        generator=generator,
        dtype=torch.float64,
        device=place,
    )
    if how == "antithetic":
        u = (u + torch.randperm(count, generator=generator, device=place)) / max(count, 1)
    elif how == "low_discrepancy":
        u = (u + van_der_corput(count).to(place)) % 1
    return from_least(u, least).to(dtype)


def from_least(u: Tensor, least: float) -> Tensor:
    """Map u in 0..1 to times in [least, 1]. Raises UserError for a `least` outside [0, 1)."""
    if not 0 <= least < 1:
        raise UserError(f"least time {least} must be at least 0 and less than 1")
    return least + (1 - least) * u


def van_der_corput(count: int, first: int = 0) -> Tensor:
    """0, 1/2, 1/4, 3/4, 1/8, …: the mirrored binary digits of `first`, `first` + 1, …; float64
    (count,)."""
    index = torch.arange(first, first + count)
    value = torch.zeros(count, dtype=torch.float64)
    for bit in range((first + count).bit_length()):
        value += (index >> bit & 1) * 2.0 ** -(bit + 1)
    return value


def _check_eps(eps: float) -> None:
    if not 0 < eps < 1:
        raise UserError(f"schedule: eps={eps} must be within 0 and 1, both excluded")
