"""Diffusion losses: identities in fp64, enumerated toys, precision, gradients, rows against whole batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from align.losses.diffusion_losses import (
    masked_cross_entropy,
    masked_nll,
    score_entropy,
)
from specalign.diffusion.graphs import Absorbing, Graph, Uniform
from specalign.diffusion.parameterization import time_weight
from specalign.diffusion.schedules import Cosine, Geometric, LogLinear, Schedule

F64 = torch.float64
SCHEDULES: list[Schedule] = [LogLinear(), LogLinear(0.2), Geometric(), Cosine()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """A batch of network outputs with everything the losses take; the mask may be any id."""

    f_BLV: Tensor
    tokens_t: Tensor
    tokens_0: Tensor
    times: Tensor
    valid: Tensor
    mask_id: int

    @property
    def graph(self) -> Absorbing:
        return Absorbing(self.f_BLV.shape[-1], self.mask_id)

    @property
    def hit(self) -> Tensor:
        return self.valid & (self.tokens_t == self.mask_id)


def make(
    seed: int = 0, vocabulary: int = 11, mask_id: int | None = None, dtype: torch.dtype = F64
) -> Case:
    g = generator(seed)
    mask_id = vocabulary - 1 if mask_id is None else mask_id
    batch, length = 3, 8
    f = torch.randn(batch, length, vocabulary, generator=g, dtype=F64).mul_(1.5).to(dtype)
    tokens_0 = torch.randint(vocabulary - 1, (batch, length), generator=g)
    tokens_0 += tokens_0 >= mask_id
    times = torch.tensor([[0.1], [0.5], [0.97]], dtype=F64)
    valid = torch.rand(batch, length, generator=g) < 0.7
    masked = torch.rand(batch, length, generator=g) < 0.6
    # prefixes may hold a mask token too: it is `valid` that decides
    return Case(f, torch.where(masked, mask_id, tokens_0), tokens_0, times, valid, mask_id)


def of(case: Case, schedule: Schedule, graph: Graph | None = None, scale: bool = True) -> Tensor:
    sigma, rate = schedule.total(case.times), schedule.rate(case.times)
    if case.f_BLV.dtype != F64:
        sigma, rate = sigma.float(), rate.float()
    return score_entropy(
        case.f_BLV,
        case.tokens_t,
        case.tokens_0,
        sigma,
        rate,
        graph or case.graph,
        case.valid,
        scale,
    )


def parts(case: Case) -> tuple[Tensor, Tensor]:
    """(−log p(x_0), Z) at every position in fp64, by plain softmax over the tokens that are not the mask."""
    others = torch.arange(case.f_BLV.shape[-1]) != case.mask_id
    kept = torch.where(others, case.f_BLV.double(), -math.inf)
    z = kept.exp().sum(-1) / int(others.sum())
    return -kept.log_softmax(-1).gather(-1, case.tokens_0[..., None])[..., 0], z


@pytest.mark.parametrize("mask_id", [10, 0, 4])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_score_entropy_is_weighted_cross_entropy_and_the_price_of_a_wrong_sum(
    schedule: Schedule, mask_id: int
) -> None:
    case = make(mask_id=mask_id)
    nll, z = parts(case)
    sigma, rate = schedule.total(case.times), schedule.rate(case.times)
    expected = torch.where(case.hit, rate / torch.expm1(sigma) * (nll + z - 1 - z.log()), 0.0)
    torch.testing.assert_close(of(case, schedule), expected, rtol=1e-10, atol=1e-10)
    # the same through the log-score and the graph's own entropy
    shift = (sigma.expm1() * (case.f_BLV.shape[-1] - 1)).log()
    log_score = (case.f_BLV - shift[..., None]).scatter(-1, case.tokens_t[..., None], 0.0)
    dse = case.graph.score_entropy(log_score, sigma, case.tokens_t, case.tokens_0)
    torch.testing.assert_close(
        torch.where(case.valid, rate * dse, 0.0), expected, rtol=1e-10, atol=1e-10
    )
    assert int(case.hit.sum()) > 5 and int((~case.valid & (case.tokens_t == mask_id)).sum()) > 0


@pytest.mark.parametrize("graph", [Absorbing(11, 10), Uniform(11)], ids=str)
def test_unscaled_score_entropy_reads_f_as_log_score(graph: Graph) -> None:
    case, schedule = make(1), Cosine()
    sigma, rate = schedule.total(case.times), schedule.rate(case.times)
    dse = graph.score_entropy(case.f_BLV, sigma, case.tokens_t, case.tokens_0)
    expected = torch.where(case.valid, rate * dse, 0.0)
    torch.testing.assert_close(
        of(case, schedule, graph, scale=False), expected, rtol=1e-10, atol=1e-10
    )
    if isinstance(graph, Uniform):
        torch.testing.assert_close(of(case, schedule, graph), expected, rtol=1e-10, atol=1e-10)
        assert bool((expected[case.valid] > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_low_precision_is_computed_in_fp32(schedule: Schedule, dtype: torch.dtype) -> None:
    case = make(4, vocabulary=5000, dtype=dtype)
    exact = make(4, vocabulary=5000)
    exact.f_BLV = case.f_BLV.double()
    for graph in (case.graph, Uniform(5000)):
        loss = of(case, schedule, graph)
        assert loss.dtype == torch.float32
        wanted = of(exact, schedule, graph)
        torch.testing.assert_close(
            loss.double() / wanted.max(), wanted / wanted.max(), rtol=1e-5, atol=1e-6
        )
    low, high = (
        masked_cross_entropy(f_BLV, case.tokens_t, case.tokens_0, case.mask_id, case.valid)
        for f_BLV in (case.f_BLV, exact.f_BLV)
    )
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), high, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sigma", [1e-4, 20.0, 80.0])
@pytest.mark.parametrize("graph", [Absorbing(11, 10), Uniform(11)], ids=str)
@pytest.mark.parametrize("scale", [True, False])
def test_extreme_noise_stays_finite(sigma: float, graph: Graph, scale: bool) -> None:
    case = make(5, dtype=torch.float32)
    f = case.f_BLV.requires_grad_()
    noise, rate = torch.tensor([[sigma]]), torch.tensor([[1.0]])
    loss = score_entropy(f, case.tokens_t, case.tokens_0, noise, rate, graph, case.valid, scale)
    wide = f.detach().double()
    exact = score_entropy(
        wide, case.tokens_t, case.tokens_0, noise.double(), rate.double(), graph, case.valid, scale
    )
    torch.testing.assert_close(loss.double(), exact, rtol=2e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(loss.sum(), f)
    assert bool(loss.isfinite().all()) and bool(slope.isfinite().all())


def losses(case: Case) -> list[tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]]:
    """(name, the loss of f, a plain fp64 formula of f), each summed."""
    schedule = LogLinear()
    sigma, rate = schedule.total(case.times), schedule.rate(case.times)
    others = torch.arange(case.f_BLV.shape[-1]) != case.mask_id
    label, weight = case.tokens_0[..., None], torch.where(case.hit, rate / torch.expm1(sigma), 0.0)

    def plain_nll(f: Tensor) -> Tensor:
        kept = torch.where(others, f, -1e30)
        return -(kept.log_softmax(-1).gather(-1, label)[..., 0] * weight).sum()

    def plain_entropy(f: Tensor) -> Tensor:
        z = torch.where(others, f.exp(), 0.0).sum(-1) / int(others.sum())
        return plain_nll(f) + (weight * (z - 1 - z.log())).sum()

    def plain_uniform(f: Tensor) -> Tensor:
        size, total = f.shape[-1], f.new_zeros(())
        for b, i in case.valid.nonzero().tolist():
            stay = torch.exp(-sigma[b, 0])
            law = torch.full((size,), float((1 - stay) / size), dtype=F64)
            law[case.tokens_0[b, i]] += stay
            ratio = law / law[case.tokens_t[b, i]]
            terms = f[b, i].exp() - ratio * f[b, i] + ratio * (ratio.log() - 1)
            keep = torch.arange(size) != case.tokens_t[b, i]
            total = total + rate[b, 0] * torch.where(keep, terms, 0.0).sum() / size
        return total

    arguments = (case.tokens_t, case.tokens_0, sigma, rate)
    return [
        ("nll", lambda f: masked_nll(f, *arguments, case.mask_id, case.valid).sum(), plain_nll),
        (
            "entropy",
            lambda f: score_entropy(f, *arguments, case.graph, case.valid).sum(),
            plain_entropy,
        ),
        (
            "uniform",
            lambda f: score_entropy(f, *arguments, Uniform(11), case.valid).sum(),
            plain_uniform,
        ),
    ]


@pytest.mark.parametrize("mask_id", [10, 0, 4])
def test_values_and_gradients_against_plain_formulas(mask_id: int) -> None:
    case = make(7, mask_id=mask_id)
    for name, loss, plain in losses(case):
        f = case.f_BLV.clone().requires_grad_()
        value, expected = loss(f), plain(f)
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10, msg=name)
        (slope,), (wanted,) = torch.autograd.grad(value, f), torch.autograd.grad(expected, f)
        torch.testing.assert_close(slope, wanted, rtol=1e-8, atol=1e-12, msg=name)
        low = case.f_BLV.float().requires_grad_()
        (rough,) = torch.autograd.grad(loss(low), low)
        torch.testing.assert_close(rough.double(), wanted, rtol=1e-4, atol=1e-5, msg=name)


def test_positions_that_do_not_count_are_never_read() -> None:
    case = make(10)
    spoiled = case.f_BLV.clone()
    spoiled[~case.hit] = math.nan
    other = Case(spoiled, case.tokens_t, case.tokens_0, case.times, case.valid, case.mask_id)
    assert torch.equal(of(other, LogLinear()), of(case, LogLinear()))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_the_time_weight_is_the_lambda_weight_in_other_coordinates(schedule: Schedule) -> None:
    t = torch.linspace(0.01, 0.99, 50, dtype=F64, requires_grad=True)
    masked = schedule.mask_probability(t)
    (slope,) = torch.autograd.grad(masked.sum(), t)
    with torch.no_grad():
        weight = time_weight(schedule.total(t), schedule.rate(t))
        torch.testing.assert_close(weight, masked.reciprocal() * slope, rtol=1e-9, atol=0)
        if isinstance(schedule, LogLinear):
            torch.testing.assert_close(weight, 1 / t, rtol=1e-9, atol=0)
