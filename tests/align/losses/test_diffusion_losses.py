"""Diffusion losses against plain fp64 formulas: values and gradients, precision, the identity with cross-entropy."""

import math

import pytest
import torch
from torch import Tensor

from align.losses.diffusion_losses import masked_cross_entropy, score_entropy
from specalign.diffusion.schedules import Geometric, LogLinear, Schedule

V = 11


def rows(seed: int, mask_id: int, vocabulary: int = V) -> tuple[Tensor, Tensor]:
    """Network outputs (R, V) in fp64 and clean tokens, which are never the mask."""
    g = torch.Generator().manual_seed(seed)
    f = 1.5 * torch.randn(24, vocabulary, generator=g, dtype=torch.float64)
    x_0 = torch.randint(vocabulary - 1, (24,), generator=g)
    return f, x_0 + (x_0 >= mask_id)


def plain(f: Tensor, x_0: Tensor, mask_id: int) -> tuple[Tensor, Tensor]:
    """(−log p(x_0), Z) by a softmax over the tokens that are not the mask."""
    others = torch.arange(f.shape[-1]) != mask_id
    kept = torch.where(others, f, -1e30)
    nll = -kept.log_softmax(-1).gather(-1, x_0[:, None])[:, 0]
    return nll, torch.where(others, f.exp(), 0.0).sum(-1) / int(others.sum())


@pytest.mark.parametrize("mask_id", [10, 0, 4])
@pytest.mark.parametrize("name", ["score_entropy", "cross_entropy"])
def test_values_and_gradients_against_plain_formulas(name: str, mask_id: int) -> None:
    """Score entropy is cross-entropy plus the price Z − 1 − log Z of a wrong sum. In fp32 too; the mask's column is never read."""
    loss = score_entropy if name == "score_entropy" else masked_cross_entropy
    f, x_0 = rows(7, mask_id)
    upstream = torch.rand(24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wide, mine = f.clone().requires_grad_(), f.clone()
    nll, z = plain(wide, x_0, mask_id)
    expected = nll + z - 1 - z.log() if name == "score_entropy" else nll
    (wanted,) = torch.autograd.grad((expected * upstream).sum(), wide)
    mine[:, mask_id] = 50.0
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        own = mine.to(dtype).requires_grad_()
        value = loss(own, x_0, mask_id)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
        (slope,) = torch.autograd.grad((value * upstream.to(dtype)).sum(), own)
        torch.testing.assert_close(slope.double(), wanted, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    f, x_0 = rows(4, 4999, vocabulary=5000)
    f = f.to(dtype)
    for loss in (score_entropy, masked_cross_entropy):
        low, high = loss(f, x_0, 4999), loss(f.double(), x_0, 4999)
        assert low.dtype == torch.float32
        torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("schedule", [LogLinear(), LogLinear(0.2), Geometric()], ids=str)
def test_the_weighted_losses_bound_the_likelihood(schedule: Schedule) -> None:
    """∫ weight·p(masked)·loss dt is the loss itself, less the noise that is never reached: for SEDD's and MDLM's bound alike."""
    t = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    total = float((schedule.weight(t) * schedule.mask_probability(t)).mean())
    start, end = schedule.total(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist()
    assert total == pytest.approx(math.exp(-start) - math.exp(-end), rel=1e-4)
