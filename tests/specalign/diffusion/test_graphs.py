"""Graphs against dense matrix exponentials, enumerated toys and empirical frequencies."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from specalign.common.errors import UserError
from specalign.diffusion.graphs import Absorbing, Graph, Uniform

F64 = torch.float64
GRAPHS: list[Graph] = [Absorbing(4, 3), Absorbing(5, 0), Absorbing(5, 2), Uniform(2), Uniform(5)]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sigma_of(value: float) -> Tensor:
    return torch.tensor(value, dtype=F64)


def dense_rate(graph: Graph) -> Tensor:
    """Q written out from its definition, without the graph's own code."""
    size = graph.size
    rate = torch.zeros(size, size, dtype=F64)
    for x, y in itertools.product(range(size), repeat=2):
        if isinstance(graph, Absorbing):
            rate[x, y] = float(y == graph.mask_id) - float(x == y)
        else:
            rate[x, y] = 1 / size - float(x == y)
    return rate


def dense(graph: Graph, sigma: float) -> Tensor:
    return torch.matrix_exp(sigma * dense_rate(graph))


def chi_square(counts: Tensor, law: Tensor) -> float:
    """p-value of counts (V,) against a law (V,); states of chance 0 must not occur."""
    possible = law > 0
    assert int(counts[~possible].sum()) == 0
    counts, expected = counts[possible].double(), law[possible] * counts.sum()
    freedom = sigma_of(float(len(expected) - 1))
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if len(expected) > 1 else 1.0


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("value", [0.1, 1.2])
def test_corruption_has_the_law_of_the_transition(graph: Graph, value: float) -> None:
    g, law = generator(7), dense(graph, value)
    for token in range(graph.size):
        clean = torch.full((20, 1000), token)
        noisy = graph.corrupt(clean, torch.full((20, 1), value), g)
        assert chi_square(noisy.flatten().bincount(minlength=graph.size), law[token]) > 1e-3
    limit = graph.limit((30, 400), g)
    assert limit.shape == (30, 400) and limit.dtype == torch.int64
    long_run = dense(graph, 60.0)[0].where(dense(graph, 60.0)[0] > 1e-12, 0.0)
    assert chi_square(limit.flatten().bincount(minlength=graph.size), long_run) > 1e-3


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
def test_corruption_keeps_what_it_may_not_touch(graph: Graph) -> None:
    clean = torch.randint(graph.size, (4, 200), generator=generator(1))
    may = torch.rand(4, 200, generator=generator(2)) < 0.5
    per_row = torch.tensor([[0.0], [1.0], [30.0], [0.3]])
    noisy = graph.corrupt(clean, per_row, generator(3), may)
    assert torch.equal(noisy[~may], clean[~may]) and torch.equal(noisy[0], clean[0])
    assert not torch.equal(noisy[1], clean[1])
    assert torch.equal(noisy, graph.corrupt(clean, per_row.expand(4, 200), generator(3), may))
    if isinstance(graph, Absorbing):
        assert bool((noisy[2][may[2]] == graph.mask_id).all())


# ---- score entropy ----


def plain_score_entropy(graph: Graph, log_score: Tensor, sigma: float, x_t: int, x_0: int) -> float:
    """Σ_{y≠x_t} Q(y, x_t)·(s − r·log s + r·(log r − 1)) term by term, with 0·log 0 = 0."""
    row, total = dense(graph, sigma)[x_0], 0.0
    for y in range(graph.size):
        weight = float(dense_rate(graph)[y, x_t])
        if y == x_t or weight == 0:
            continue
        r, log_s = float(row[y] / row[x_t]), float(log_score[y])
        total += weight * (
            math.exp(log_s) - (r * log_s - r * (math.log(r) - 1) if r > 1e-300 else 0.0)
        )
    return total


@pytest.mark.parametrize("graph", GRAPHS, ids=str)
@pytest.mark.parametrize("sigma", [1e-3, 0.4, 3.0])
def test_score_entropy_is_its_definition(graph: Graph, sigma: float) -> None:
    log_score = torch.randn(graph.size, generator=generator(2), dtype=F64)
    states = range(graph.size)
    clean = [x for x in states if not (isinstance(graph, Absorbing) and x == graph.mask_id)]
    for x_0, x_t in itertools.product(clean, states):
        if float(dense(graph, sigma)[x_0, x_t]) == 0.0:
            continue
        value = graph.score_entropy(
            log_score, sigma_of(sigma), torch.tensor(x_t), torch.tensor(x_0)
        )
        expected = plain_score_entropy(graph, log_score, sigma, x_t, x_0)
        assert float(value) == pytest.approx(expected, rel=1e-9, abs=1e-10)
        assert float(value) >= 0
        pushed = log_score.index_add(0, torch.tensor([x_t]), sigma_of(3.0).view(1))
        again = graph.score_entropy(pushed, sigma_of(sigma), torch.tensor(x_t), torch.tensor(x_0))
        assert float(again) == pytest.approx(
            float(value), rel=1e-12
        )  # the input's own score is not read


def test_impossible_graphs_are_refused() -> None:
    for make, says in [
        (lambda: Absorbing(4, 4), "mask_id=4 is not within 0..3"),
        (lambda: Absorbing(4, -1), "mask_id=-1"),
        (lambda: Absorbing(1, 0), "size=1"),
        (lambda: Uniform(1), "size=1"),
    ]:
        with pytest.raises(UserError, match=says.replace("..", r"\.\.")):
            make()
