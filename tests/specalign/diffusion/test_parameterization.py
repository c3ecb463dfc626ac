"""Each parameterisation by its definition; what they share with the losses: tests/align/losses/test_diffusion_losses.py."""

from __future__ import annotations

import math

import pytest
import torch

from specalign.diffusion.parameterization import (
    log_expm1,
    logsumexp_and_label,
    logsumexp_without,
    time_weight,
)

MASK = 2
GENERATOR = torch.Generator().manual_seed(0)
F_RV = torch.randn(4, 5, generator=GENERATOR, dtype=torch.float64)
SIGMA = torch.tensor([0.1, 1.0, 3.0, 7.0], dtype=torch.float64)


@pytest.mark.parametrize("sigma", [1e-12, 1e-3, 1.0, 30.0, 500.0])
def test_log_expm1_neither_overflows_nor_cancels(sigma: float) -> None:
    expected = sigma + math.log1p(-math.exp(-sigma)) if sigma > 1 else math.log(math.expm1(sigma))
    assert float(log_expm1(torch.tensor(sigma, dtype=torch.float64))) == pytest.approx(
        expected, rel=1e-12
    )
    assert log_expm1(torch.tensor(sigma).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("column", [0, MASK, 4])
def test_a_sum_without_a_column_and_its_gradient(column: int) -> None:
    others = [i for i in range(5) if i != column]
    label = torch.tensor([others[0], others[1], others[2], others[0]])
    x, y = (F_RV.clone().requires_grad_() for _ in range(2))
    total, mine = logsumexp_and_label(x, label, column)
    expected = y[:, others].logsumexp(-1), y.gather(-1, label[:, None])[:, 0]
    torch.testing.assert_close((total, mine), expected)
    torch.testing.assert_close(logsumexp_without(x, column), expected[0])
    (total * SIGMA + mine * 3).sum().backward()
    (expected[0] * SIGMA + expected[1] * 3).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_the_weight_of_a_masked_position() -> None:
    rate = torch.tensor([1.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(time_weight(SIGMA, rate), rate / (SIGMA.exp() - 1))
