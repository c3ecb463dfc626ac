"""Schedules by identity: the rate is the derivative, the time the inverse; times are uniform and spread as promised."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.diffusion.schedules import (
    TIMES,
    Cosine,
    Geometric,
    LogLinear,
    Schedule,
    draw_times,
    schedule,
)

ALL = [LogLinear(), LogLinear(0.1), Geometric(), Geometric(1e-3, 1.0), Cosine(), Cosine(0.05)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grid(dtype: torch.dtype = torch.float64, last: float = 1.0) -> Tensor:
    return torch.linspace(1e-3, last, 401, dtype=dtype)


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_the_rate_is_the_derivative_of_the_total(noise: Schedule) -> None:
    t = grid().requires_grad_()
    (slope,) = torch.autograd.grad(noise.total(t).sum(), t)
    torch.testing.assert_close(noise.rate(t.detach()), slope, rtol=1e-10, atol=0)
    assert bool((slope > 0).all())


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_the_time_inverts_the_total(noise: Schedule) -> None:
    t = grid()
    torch.testing.assert_close(noise.time(noise.total(t)), t, rtol=1e-9, atol=1e-12)
    tiny = torch.tensor([1e-6, 1e-5, 1e-4])
    torch.testing.assert_close(noise.time(noise.total(tiny)), tiny, rtol=1e-4, atol=1e-7)


def test_values_as_published() -> None:
    t = grid()
    eps = 1e-3
    torch.testing.assert_close(LogLinear().mask_probability(t), (1 - eps) * t)
    torch.testing.assert_close(LogLinear().total(t), -torch.log(1 - (1 - eps) * t))
    torch.testing.assert_close(Geometric(1e-4, 20).total(t), 1e-4 ** (1 - t) * 20**t)
    torch.testing.assert_close(
        Cosine().total(t), -torch.log(eps + (1 - eps) * torch.cos(t * math.pi / 2))
    )
    torch.testing.assert_close(
        Cosine().mask_probability(torch.ones(1, dtype=torch.float64)).item(),
        1 - eps,
        rtol=1e-12,
        atol=0,
    )


def test_the_factory() -> None:
    assert schedule("loglinear") == LogLinear(1e-3) and schedule("cosine", eps=0.1) == Cosine(0.1)
    assert schedule("geometric", sigma_min=1e-3, sigma_max=1) == Geometric(1e-3, 1)
    for name, options, says in [
        ("loglinar", {}, "did you mean 'loglinear'"),
        ("cosine", {"epsilon": 0.1}, "unknown option 'epsilon' (did you mean 'eps'?)"),
        ("loglinear", {"eps": 0.0}, "eps=0.0"),
        ("cosine", {"eps": 1.5}, "eps=1.5"),
        ("geometric", {"sigma_min": 0.0}, "sigma_min=0.0"),
        ("geometric", {"sigma_min": 2.0, "sigma_max": 1.0}, "sigma_max=1.0"),
        ("geometric", {"sigma_max": math.nan}, "sigma_max=nan"),
        ("loglinear", {"eps": "small"}, "eps='small' must be a number"),
    ]:
        with pytest.raises(UserError) as error:
            schedule(name, **options)
        assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("how", TIMES)
def test_each_time_is_uniform_by_itself(how: str) -> None:
    g, least, draws = generator(3), 0.05, 4000
    t = torch.stack([draw_times(5, how, g, least, dtype=torch.float64) for _ in range(draws)])
    assert t.min() >= least and t.max() <= 1
    u, _ = ((t - least) / (1 - least)).sort(0)
    steps = (torch.arange(draws, dtype=torch.float64)[:, None] + 0.5) / draws
    gap = (u - steps).abs().amax(0)
    assert bool((gap < 1.95 / math.sqrt(draws)).all()), (
        gap
    )  # Kolmogorov–Smirnov at 0.1% for each of the five places


def spread(how: str, count: int = 16, repeats: int = 2000) -> float:
    """Variance of the mean of a smooth function over `count` times, relative to the function's own over count."""
    g = generator(1)
    t = torch.stack([draw_times(count, how, g, 0.0, dtype=torch.float64) for _ in range(repeats)])
    means = torch.exp(t).mean(1)
    own = (math.e**2 - 1) / 2 - (math.e - 1) ** 2
    assert abs(means.mean() - (math.e - 1)) < 4 * means.std() / math.sqrt(repeats)
    return float(means.var() / (own / count))


def test_strata_and_low_discrepancy_reduce_the_variance() -> None:
    assert 0.9 < spread("uniform") < 1.1
    assert (
        spread("antithetic") < 0.01
    )  # of the order 1/n², n = 16: independent draws within the strata
    assert (
        spread("low_discrepancy") < 0.1
    )  # 1/n: one shift for all, hence errors that do not cancel


def test_neighbours_of_a_low_discrepancy_sequence_are_spread() -> None:
    t = draw_times(64, "low_discrepancy", generator(2), 0.0, dtype=torch.float64)
    for start in range(
        0, 64, 8
    ):  # any aligned run of 8 has one time in each eighth, up to the shift
        run = ((t[start : start + 8] - t[0]) % 1).sort().values
        assert torch.equal((run * 8 + 1e-9).long(), torch.arange(8))
    for start in range(56):
        run = t[start : start + 8].sort().values
        assert (run.diff().max() < 0.26) and run[0] + 1 - run[-1] < 0.26
