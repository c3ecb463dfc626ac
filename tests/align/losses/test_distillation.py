"""Every loss against a float64 reference, values and gradients; chunks, vocabularies, dtypes, memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from align.config.drafter import LOSS_NAMES
from align.losses.distillation import Objective, after_prefix, d_pace_weights, streak
from align.losses.divergence_gradients import target_places
from specalign.diffusion.noise import LOG_ZERO
from tests.logits import Case, make


def test_label_outside_the_vocabulary() -> None:
    case = make(seed=10, kept=6)
    got = case.statistics()
    assert case.draft_vocab is not None
    inside = torch.isin(case.places.next_P[case.rows.place_R], case.draft_vocab).view(case.shape)
    assert 0 < int(inside.sum()) < inside.numel()
    assert torch.equal(got.log_q_label > LOG_ZERO, inside)
    assert (got.log_q_label[~inside] == LOG_ZERO).all()
    (grad,) = torch.autograd.grad(got.log_q_label[~inside].sum(), case.rows.hidden_RD)
    assert (grad == 0).all()
    valid = torch.ones(case.shape, dtype=torch.bool)
    assert (Objective({"cross_entropy": 1.0}).term("cross_entropy", got, valid)[~inside] == 0).all()


def test_extreme_logits_stay_finite() -> None:
    case = make(seed=13, kept=9)
    case.rows.hidden_RD = (case.rows.hidden_RD.detach() * 200).requires_grad_()
    case.places = target_places(
        case.places.hidden_PD * 200, case.places.next_P, lambda x: x @ case.head_VD.t(), chunk=4
    )
    got = case.statistics()
    valid = torch.ones(case.shape, dtype=torch.bool)
    total = Objective(dict.fromkeys(LOSS_NAMES, 1.0)).per_position(got, valid).sum()
    (grad,) = torch.autograd.grad(total, case.rows.hidden_RD)
    assert math.isfinite(float(total)) and bool(grad.isfinite().all())
    assert bool(((got.acceptance >= 0) & (got.acceptance <= 1 + 1e-6)).all())


# ---- position weights, streak, objective ----


def random_log_q(seed: int = 0, shape: tuple[int, ...] = (5, 4)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(shape, generator=generator, dtype=torch.float64) * 3


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_d_pace_weights_follow_their_definition(alpha: float) -> None:
    log_q = random_log_q(1)
    smooth = (1 - alpha) * log_q.exp() + alpha
    products = [smooth[:, : m + 1].prod(-1) for m in range(4)]
    want = torch.stack([sum(products[k:]) for k in range(4)], dim=-1)
    got = d_pace_weights(log_q.requires_grad_(), alpha, torch.ones(5, 4))
    torch.testing.assert_close(got, want)
    assert not got.requires_grad


@pytest.mark.parametrize("cut", [4, 2, 1])
def test_gradient_of_streak_is_that_of_d_pace_at_alpha_zero(cut: int) -> None:
    """−grad J = grad Σ_k −w_k log q_k (objectives.md, section 6), J = Σ_m Π_{j≤m} q_j."""
    log_q = random_log_q(3).requires_grad_()
    valid = (torch.arange(4) < cut).expand(5, 4)
    loss = streak(log_q, valid)
    torch.testing.assert_close(loss[:, 0], -log_q[:, 0].exp())
    torch.testing.assert_close(loss.sum(-1), -log_q.exp()[:, :cut].cumprod(-1).sum(-1))
    weighted = -(d_pace_weights(log_q, 0.0, valid) * log_q)
    (a,) = torch.autograd.grad(loss.sum(), log_q)
    (b,) = torch.autograd.grad(weighted.sum(), log_q)
    torch.testing.assert_close(a, b)


def objective_reference(
    case: Case, valid: Tensor, terms: dict[str, float], w: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Any]:
    """Values at every position, and what gradients are taken of."""
    want, leaves = case.reference()
    weights = w(want["log_q_label"].detach()) * valid
    total = torch.zeros(case.shape, dtype=torch.float64)
    for name, weight in terms.items():
        if name == "streak":
            running = (want["log_q_label"].exp() * valid).cumprod(-1)
            total = total - weight * running
        elif name == "cross_entropy":
            inside = want["log_q_label"] > LOG_ZERO
            total = total + weight * weights * torch.where(inside, -want["log_q_label"], 0.0)
        elif name == "lk":
            total = total - weight * weights * (1 - want["total_variation"]).log()
        elif name == "confidence":
            foretold = case.rows.hidden_RD.detach().double().sum(-1).view(case.shape).sigmoid()
            beta = want["acceptance"]
            loss = -(beta * foretold.log() + (1 - beta) * (1 - foretold).log())
            total = total + weight * weights * loss
        else:
            total = total + weight * weights * want[name]
    return total, leaves


@pytest.mark.parametrize("weighting", ["d_pace", "exponential", "normalised", "uniform"])
def test_objective_sums_its_terms(weighting: str) -> None:
    case = make(seed=15, kept=9)
    valid = torch.ones(case.shape, dtype=torch.bool)
    valid[0, 1:], valid[1] = False, False
    terms = {name: 0.5 + i for i, name in enumerate(LOSS_NAMES)}

    def weights(log_q: Tensor) -> Tensor:
        if weighting == "d_pace":
            return d_pace_weights(log_q, 0.3, valid)
        if weighting == "uniform":
            return torch.ones_like(log_q)
        decayed = torch.exp(-torch.arange(log_q.shape[-1]) / 0.5).expand_as(log_q)
        if weighting == "exponential":
            return decayed
        return decayed / (decayed * valid).sum(-1, keepdim=True).clamp_min(1e-9)

    objective = Objective(terms, weighting, decay=0.5, alpha=0.3)
    assert not objective.weights(case.statistics(), valid).requires_grad
    got = objective.per_position(case.statistics(), valid)
    want, _ = objective_reference(case, valid, terms, weights)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert (got[~valid] == 0).all()
    (grad,) = torch.autograd.grad(got.sum(), case.rows.hidden_RD)
    assert (grad.view(*case.shape, -1)[~valid] == 0).all()
    for name in LOSS_NAMES:
        alone, _ = objective_reference(case, valid, {name: 1.0}, torch.ones_like)
        value = objective.term(name, case.statistics(), valid).sum()
        assert float(value) == pytest.approx(float(alone.sum()), rel=1e-4)


@pytest.mark.parametrize("name", ["lk", "streak"])
def test_gradients_of_whole_terms_match_float64(name: str) -> None:
    """Down to the hidden states, of terms that are not one statistic alone."""
    case = make(seed=21, kept=9, rank=3)
    valid = torch.ones(case.shape, dtype=torch.bool)
    valid[0, 2:] = False
    objective = Objective({name: 1.0}, "uniform")
    loss = objective.per_position(case.statistics(), valid).sum()
    want, leaves = objective_reference(case, valid, {name: 1.0}, torch.ones_like)
    expected = torch.autograd.grad((want * valid).sum(), leaves)
    for a, e in zip(torch.autograd.grad(loss, case.leaves), expected, strict=True):
        torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=1e-5)


def test_what_a_block_shows_is_shifted_out() -> None:
    got = make(anchors=4).statistics().map(lambda value: value.view(2, 2, 3))
    valid = torch.ones(2, 2, 3, dtype=torch.bool)
    valid[0, 1, 2] = False
    shifted, inside = after_prefix(got, valid, torch.tensor([[0, 1], [3, 2]]))
    alone = [True, False, False]
    assert inside.tolist() == [[[True] * 3, alone], [[False] * 3, alone]]
    shown = torch.cat((got.p_label[0, 0], got.p_label[0, 1, 1:2], got.p_label[1, 1, 2:]))
    assert torch.equal(shifted.p_label[inside], shown)
