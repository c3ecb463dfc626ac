"""Schedules by identity: the rate is the derivative, the time the inverse, the weight MDLM's."""

import pytest
import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.diffusion.schedules import Geometric, LogLinear, Schedule, schedule

ALL = [LogLinear(), LogLinear(0.1), Geometric(), Geometric(1e-3, 1.0)]
T = torch.linspace(1e-3, 1.0, 401, dtype=torch.float64)


@pytest.mark.parametrize("noise", ALL, ids=str)
def test_a_schedule_is_consistent(noise: Schedule) -> None:
    t = T.clone().requires_grad_()

    def slope(of: Tensor) -> Tensor:
        return torch.autograd.grad(of.sum(), t)[0]

    rate = slope(noise.total(t))
    torch.testing.assert_close(noise.rate(T), rate, rtol=1e-10, atol=0)
    assert bool((rate > 0).all())
    torch.testing.assert_close(noise.time(noise.total(T)), T, rtol=1e-9, atol=1e-12)
    tiny = torch.tensor([1e-6, 1e-5, 1e-4])
    torch.testing.assert_close(noise.time(noise.total(tiny)), tiny, rtol=1e-4, atol=1e-7)
    masked = noise.mask_probability(t)
    weight = slope(masked) / masked.detach()
    torch.testing.assert_close(noise.weight(T), weight, rtol=1e-7, atol=1e-13)


def test_values_as_published() -> None:
    eps = 1e-3
    torch.testing.assert_close(LogLinear().mask_probability(T), (1 - eps) * T)
    torch.testing.assert_close(LogLinear().weight(T), 1 / T)
    torch.testing.assert_close(Geometric(1e-4, 20).total(T), 1e-4 ** (1 - T) * 20**T)


def test_the_factory() -> None:
    assert schedule("loglinear") == LogLinear(1e-3)
    assert schedule("loglinear", eps=0.1) == LogLinear(0.1)
    assert schedule("geometric", sigma_min=1e-3, sigma_max=1) == Geometric(1e-3, 1)
    for name, options, says in [
        ("loglinar", {}, "did you mean 'loglinear'"),
        ("loglinear", {"epsilon": 0.1}, "epsilon=0.1 is not a number of"),
        ("loglinear", {"eps": 0.0}, "eps=0.0"),
        ("geometric", {"sigma_min": 2.0, "sigma_max": 1.0}, "sigma_max=1.0"),
        ("loglinear", {"eps": "small"}, "eps='small' is not a number"),
    ]:
        with pytest.raises(UserError) as error:
            schedule(name, **options)
        assert says in str(error.value)
