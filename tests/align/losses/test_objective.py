"""Every loss against a float64 reference, values and gradients; chunks, vocabularies, dtypes, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from align.common.errors import UserError
from align.config.recipe import LOSS_NAMES
from align.losses import divergences as module
from align.losses.objective import (
    DIVERGENCES,
    LOG_ZERO,
    LOSSES,
    WEIGHTINGS,
    DraftRows,
    Objective,
    RowStatistics,
    TargetPlaces,
    d_pace_weights,
    exponential_weights,
    row_statistics,
    streak,
    target_places,
)

ALL = frozenset(DIVERGENCES)


@dataclass
class Case:
    """A random drafter and target; statistics of its rows in fp32, and in float64 by a plain formula."""

    rows: DraftRows
    places: TargetPlaces
    head_VD: Tensor
    draft_vocab: Tensor | None
    shape: tuple[int, int]
    temperature: float = 1.0
    draft_temperature: float = 1.0

    @property
    def head_VdD(self) -> Tensor:
        return self.head_VD if self.draft_vocab is None else self.head_VD[self.draft_vocab].contiguous()

    @property
    def leaves(self) -> list[Tensor]:
        given = (self.rows.hidden_RD, self.rows.z_Rr, self.rows.basis_rV)
        return [x for x in given if x is not None]

    def statistics(self, wanted: frozenset[str] = ALL, chunk_rows: int = 1024) -> RowStatistics:
        """With a confidence head that sums hidden states."""
        found = row_statistics(
            self.rows,
            self.places,
            self.head_VdD,
            self.draft_vocab,
            self.shape,
            wanted,
            self.temperature,
            chunk_rows,
            self.draft_temperature,
        )
        return replace(found, confidence=self.rows.hidden_RD.sum(-1).view(self.shape))

    def reference(self) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Every statistic in float64 over the whole vocabulary, q = 0 outside the draft vocabulary; and its leaves."""
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        logits = leaves[0] @ self.head_VdD.double().t()
        if len(leaves) > 1:
            logits = logits + leaves[1] @ leaves[2]
        q_draft = (logits / self.draft_temperature).softmax(-1)
        vocabulary = len(self.head_VD)
        ids = torch.arange(vocabulary) if self.draft_vocab is None else self.draft_vocab
        q = torch.zeros(len(q_draft), vocabulary, dtype=torch.float64).index_copy(1, ids, q_draft)
        target = self.places.hidden_PD[self.rows.place_R].double() @ self.head_VD.double().t()
        p = (target / self.temperature).softmax(-1)
        inside = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
        safe_q = torch.where(inside, q, 1.0)
        m = (p + q) / 2
        label = self.places.next_P[self.rows.place_R]
        q_label = safe_q.gather(1, label[:, None])[:, 0]
        values = {
            "log_q_label": torch.where(inside[label], q_label.log(), LOG_ZERO),
            "forward_kl": torch.where(inside, p * (p / safe_q).log(), 0.0).sum(-1),
            "reverse_kl": torch.where(inside, q * (safe_q / p).log(), 0.0).sum(-1),
            "jensen_shannon": (
                (p * (p / m).log()).sum(-1) + torch.where(inside, q * (safe_q / m).log(), 0.0).sum(-1)
            )
            / 2,
            "total_variation": (p - q).abs().sum(-1) / 2,
            "acceptance": torch.minimum(p, q).sum(-1),
            "p_label": p.gather(1, label[:, None])[:, 0],
            "match": (q.argmax(-1) == p.argmax(-1)).double(),
            "greedy_label": (label == p.argmax(-1)).double(),
        }
        return {name: value.view(self.shape) for name, value in values.items()}, leaves


def make(
    seed: int = 0,
    anchors: int = 6,
    block: int = 3,
    vocabulary: int = 17,
    kept: int | None = None,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    draft_temperature: float = 1.0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    width, positions, rows = 5, 11, anchors * block
    head = torch.randn(vocabulary, width, generator=g).to(dtype)
    hidden_p = torch.randn(positions, width, generator=g).to(dtype)
    following = torch.randint(0, vocabulary, (positions,), generator=g)
    draft_vocab = torch.randperm(vocabulary, generator=g)[:kept].sort().values if kept else None
    places = target_places(
        hidden_p, following, lambda x: x.float() @ head.float().t(), temperature=temperature, chunk=4
    )
    draft = DraftRows(
        torch.randn(rows, width, generator=g).to(dtype).requires_grad_(),
        torch.randint(0, positions, (rows,), generator=g),
    )
    if rank:
        draft.z_Rr = torch.randn(rows, rank, generator=g).to(dtype).requires_grad_()
        draft.basis_rV = torch.randn(rank, kept or vocabulary, generator=g).requires_grad_()
    return Case(draft, places, head, draft_vocab, (anchors, block), temperature, draft_temperature)


def check(case: Case, name: str, chunk_rows: int = 1024, rtol: float = 1e-4, atol: float = 5e-6) -> None:
    """Value and gradients of one statistic, under a random upstream gradient."""
    want, leaves64 = case.reference()
    got = getattr(case.statistics(chunk_rows=chunk_rows), name)
    assert got.dtype == torch.float32 and got.shape == case.shape
    torch.testing.assert_close(got.double(), want[name], rtol=rtol, atol=atol)
    upstream = torch.randn(case.shape, generator=torch.Generator().manual_seed(9))
    expected = torch.autograd.grad((want[name] * upstream.double()).sum(), leaves64)
    actual = torch.autograd.grad((got * upstream).sum(), case.leaves)
    for a, e, leaf in zip(actual, expected, case.leaves, strict=True):
        assert a.dtype == leaf.dtype
        if leaf.dtype == torch.bfloat16:  # the gradient itself is rounded to the leaf's dtype, once
            torch.testing.assert_close(a.double(), e, rtol=2**-8, atol=atol)
        else:
            torch.testing.assert_close(a.double(), e, rtol=rtol, atol=atol)


DIFFERENTIABLE = ("log_q_label", *DIVERGENCES)
KINDS = {
    "full": {},
    "pruned": {"kept": 9},
    "one_token": {"kept": 1},
    "markov": {"rank": 3},
    "pruned_markov": {"kept": 8, "rank": 2},
    "warm_target": {"temperature": 0.7},
    "warm_both": {"temperature": 1.5, "draft_temperature": 1.5, "kept": 9, "rank": 2},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_statistics_and_gradients_match_float64(name: str, kind: str) -> None:
    check(make(seed=3, **KINDS[kind]), name)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_chunks_that_recompute_match_float64(name: str) -> None:
    check(make(seed=4, kept=9, rank=3), name, chunk_rows=5)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_bf16_inputs_are_computed_in_fp32(name: str) -> None:
    check(make(seed=5, kept=9, rank=3, dtype=torch.bfloat16), name)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    anchors=st.integers(1, 4),
    block=st.integers(1, 4),
    vocabulary=st.integers(2, 20),
    share=st.floats(0.05, 1.0),
    rank=st.integers(0, 3),
    chunk=st.integers(1, 20),
)
def test_any_shape_matches_float64(
    seed: int, anchors: int, block: int, vocabulary: int, share: float, rank: int, chunk: int
) -> None:
    kept = max(1, int(share * vocabulary)) if share < 0.9 else None
    case = make(seed, anchors, block, vocabulary, kept, rank)
    for name in DIFFERENTIABLE:
        check(case, name, chunk, rtol=1e-3, atol=5e-5)


def test_statistics_without_gradient_match() -> None:
    for kind in KINDS.values():
        case = make(seed=6, anchors=40, **kind)
        want, _ = case.reference()
        got = case.statistics()
        for name in ("acceptance", "p_label", "match", "greedy_label"):
            value = getattr(got, name)
            assert not value.requires_grad and value.dtype == torch.float32
            torch.testing.assert_close(value.double(), want[name], rtol=1e-4, atol=1e-6)


def test_only_what_is_wanted_is_made() -> None:
    got = make().statistics(frozenset({"reverse_kl"}))
    assert got.reverse_kl is not None
    assert got.forward_kl is None and got.jensen_shannon is None and got.total_variation is None


def test_several_gradients_at_once_add_up() -> None:
    case = make(seed=7, kept=9, rank=2)
    want, leaves64 = case.reference()
    weights = {name: 0.3 + i for i, name in enumerate(DIFFERENTIABLE)}
    got = case.statistics(chunk_rows=4)
    total = sum(w * getattr(got, n).sin().sum() for n, w in weights.items())
    total64 = sum(w * want[n].sin().sum() for n, w in weights.items())
    for a, e in zip(
        torch.autograd.grad(total, case.leaves), torch.autograd.grad(total64, leaves64), strict=True
    ):
        torch.testing.assert_close(a.double(), e, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 18])
def test_chunked_equals_unchunked(chunk_rows: int) -> None:
    case = make(seed=8, kept=9, rank=3)
    valid = torch.ones(case.shape, dtype=torch.bool)
    objective = Objective(dict.fromkeys(LOSSES, 0.5))
    whole, part = case.statistics(), case.statistics(chunk_rows=chunk_rows)
    for name in (*DIFFERENTIABLE, "acceptance", "match", "p_label", "greedy_label"):
        torch.testing.assert_close(getattr(whole, name), getattr(part, name), rtol=1e-5, atol=1e-6)
    first = torch.autograd.grad(objective(whole, valid), case.leaves)
    second = torch.autograd.grad(objective(part, valid), case.leaves)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_cpu_blocks_equal_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a kept chunk a CPU works in blocks of what its cache holds."""
    case = make(seed=8, rank=3)
    whole = torch.autograd.grad(case.statistics().forward_kl.sum(), case.leaves)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(module, "_BLOCK_ROWS", 4)
    for a, b in zip(whole, torch.autograd.grad(case.statistics().forward_kl.sum(), case.leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_pruned_with_every_token_is_full() -> None:
    full = make(seed=9)
    pruned = replace(full, draft_vocab=torch.arange(17))
    a, b = full.statistics(), pruned.statistics()
    for name in (*DIFFERENTIABLE, "acceptance", "match", "p_label", "greedy_label"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name


def test_label_outside_the_vocabulary() -> None:
    case = make(seed=10, kept=6)
    got = case.statistics()
    assert case.draft_vocab is not None
    inside = torch.isin(case.places.next_P[case.rows.place_R], case.draft_vocab).view(case.shape)
    assert 0 < int(inside.sum()) < inside.numel()
    assert torch.equal(got.in_vocabulary, inside)
    assert (got.log_q_label[~inside] == LOG_ZERO).all()
    (grad,) = torch.autograd.grad(got.log_q_label[~inside].sum(), case.rows.hidden_RD)
    assert (grad == 0).all()
    valid = torch.ones(case.shape, dtype=torch.bool)
    for name in ("cross_entropy", "streak"):
        assert math.isfinite(float(Objective({name: 1.0}).metrics(case.statistics(), valid)[name]))
    assert (Objective({"cross_entropy": 1.0}).term("cross_entropy", got, valid)[~inside] == 0).all()


def test_match_is_false_where_the_best_token_cannot_be_drafted() -> None:
    case = make(seed=11, anchors=60)
    best = case.places.best_P
    case.draft_vocab = torch.tensor([t for t in range(17) if t != int(best[0])])
    at_first = (case.rows.place_R == 0).view(case.shape)
    assert bool(at_first.any()) and float(case.statistics().match[at_first].sum()) == 0


def test_autocast_changes_nothing() -> None:
    case = make(seed=12, rank=2)
    plain = case.statistics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = case.statistics()
        (grad,) = torch.autograd.grad(cast.forward_kl.sum(), case.rows.hidden_RD)
    assert torch.equal(plain.forward_kl, cast.forward_kl)
    assert torch.equal(grad, torch.autograd.grad(plain.forward_kl.sum(), case.rows.hidden_RD)[0])


def test_extreme_logits_stay_finite() -> None:
    case = make(seed=13, kept=9)
    case.rows.hidden_RD = (case.rows.hidden_RD.detach() * 200).requires_grad_()
    case.places = target_places(
        case.places.hidden_PD * 200, case.places.next_P, lambda x: x @ case.head_VD.t(), chunk=4
    )
    got = case.statistics()
    total = Objective(dict.fromkeys(LOSSES, 1.0))(got, torch.ones(case.shape, dtype=torch.bool))
    (grad,) = torch.autograd.grad(total, case.rows.hidden_RD)
    assert math.isfinite(float(total)) and bool(grad.isfinite().all())
    assert bool(((got.acceptance >= 0) & (got.acceptance <= 1 + 1e-6)).all())


def saved_bytes(case: Case, chunk_rows: int) -> int:
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.statistics(frozenset({"forward_kl"}), chunk_rows)
    return sum(sizes.values())


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    few, many = (make(anchors=a, block=4, vocabulary=2000, kept=1500) for a in (16, 160))
    grown = saved_bytes(many, 16) - saved_bytes(few, 16)
    assert grown < 576 * 200, "a few numbers a row, not a row of the vocabulary"
    assert saved_bytes(many, 10**6) > 640 * 1500 * 4, "the measurement sees what one large chunk keeps"


# ---- position weights, streak, objective ----


def random_log_q(seed: int = 0, shape: tuple[int, ...] = (5, 4)) -> Tensor:
    return -torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_d_pace_weights_follow_their_definition(alpha: float) -> None:
    log_q = random_log_q(1)
    smooth = (1 - alpha) * log_q.exp() + alpha
    want = torch.stack([sum(smooth[:, : m + 1].prod(-1) for m in range(k, 4)) for k in range(4)], dim=-1)
    torch.testing.assert_close(d_pace_weights(log_q, alpha), want)
    assert not d_pace_weights(log_q.requires_grad_(), alpha).requires_grad


def test_d_pace_weights_end_with_the_text() -> None:
    log_q, valid = random_log_q(2), torch.tensor([True, True, False, False]).expand(5, 4)
    got = d_pace_weights(log_q, 0.5, valid)
    torch.testing.assert_close(got[:, :2], d_pace_weights(log_q[:, :2], 0.5))
    assert (got[:, 2:] == 0).all()


def test_exponential_weights() -> None:
    got = exponential_weights(random_log_q(), decay=7.0)
    torch.testing.assert_close(got[0], torch.tensor([math.exp(-k / 7) for k in range(4)]))


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


def test_streak_and_d_pace_agree_down_to_the_hidden_states() -> None:
    case = make(seed=14, kept=9, rank=2)
    valid = torch.rand(case.shape, generator=torch.Generator().manual_seed(1)).argsort(-1).cumsum(-1) < 4
    valid = valid.long().cumprod(-1).bool()
    grads = [
        torch.autograd.grad(objective(case.statistics(), valid), case.leaves)
        for objective in (Objective({"streak": 1.0}), Objective({"cross_entropy": 1.0}, "d_pace", alpha=0.0))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)


def objective_reference(
    case: Case, valid: Tensor, terms: dict[str, float], w: Callable[[Tensor], Tensor]
) -> Tensor:
    want, _ = case.reference()
    weights = w(want["log_q_label"].detach()) * valid
    total = torch.zeros(case.shape, dtype=torch.float64)
    for name, weight in terms.items():
        if name == "streak":
            running = (want["log_q_label"].exp() * valid).cumprod(-1)
            total = total - weight * running
        elif name == "cross_entropy":
            inside = want["log_q_label"] > LOG_ZERO
            total = total + weight * weights * torch.where(inside, -want["log_q_label"], 0.0)
        elif name == "confidence":
            foretold = case.rows.hidden_RD.detach().double().sum(-1).view(case.shape).sigmoid()
            beta = want["acceptance"]
            loss = -(beta * foretold.log() + (1 - beta) * (1 - foretold).log())
            total = total + weight * weights * loss
        else:
            total = total + weight * weights * want[name]
    return total


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_objective_sums_its_terms(weighting: str) -> None:
    case = make(seed=15, kept=9)
    valid = torch.ones(case.shape, dtype=torch.bool)
    valid[0, 1:], valid[1] = False, False
    terms = {name: 0.5 + i for i, name in enumerate(LOSSES)}

    def weights(log_q: Tensor) -> Tensor:
        if weighting == "d_pace":
            return d_pace_weights(log_q, 0.3, valid)
        return exponential_weights(log_q, 2.0) if weighting == "exponential" else torch.ones_like(log_q)

    objective = Objective(terms, weighting, decay=2.0, alpha=0.3)
    got = objective.per_position(case.statistics(objective.wanted), valid)
    want = objective_reference(case, valid, terms, weights)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    assert (got[~valid] == 0).all()
    loss = objective(case.statistics(), valid)
    torch.testing.assert_close(loss.double(), want.sum() / 5, rtol=1e-4, atol=1e-5)
    (grad,) = torch.autograd.grad(loss, case.rows.hidden_RD)
    assert (grad.view(*case.shape, -1)[~valid] == 0).all()
    metrics = objective.metrics(case.statistics(), valid)
    assert list(metrics) == list(LOSSES) and all(isinstance(v, float) for v in metrics.values())


def test_nothing_valid_is_no_loss() -> None:
    case = make()
    valid = torch.zeros(case.shape, dtype=torch.bool)
    assert float(Objective(dict.fromkeys(LOSSES, 1.0))(case.statistics(), valid)) == 0.0


def test_a_non_finite_row_outside_the_text_does_no_harm() -> None:
    case = make()
    statistics, valid = case.statistics(), torch.ones(case.shape, dtype=torch.bool)
    valid[2] = False
    statistics.forward_kl[2] = math.nan
    assert math.isfinite(float(Objective({"forward_kl": 1.0})(statistics, valid)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"terms": {"foward_kl": 1.0}}, "did you mean 'forward_kl'"),
        ({"terms": {}}, "empty"),
        ({"terms": {"streak": 0.0}}, "objective.terms.streak=0.0"),
        ({"terms": {"streak": math.inf}}, "finite"),
        ({"terms": {"streak": 1.0}, "weighting": "dpace"}, "did you mean 'd_pace'"),
        ({"terms": {"streak": 1.0}, "decay": 0.0}, "objective.decay=0.0"),
        ({"terms": {"streak": 1.0}, "alpha": 1.5}, "objective.d_pace_alpha=1.5"),
    ],
)
def test_objective_refuses(arguments: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Objective(**arguments)


def test_row_statistics_refuses() -> None:
    case = make(kept=9)
    with pytest.raises(UserError, match="did you mean 'reverse_kl'"):
        case.statistics(frozenset({"revers_kl"}))
    with pytest.raises(ValueError, match=r"temperature 1\.0, not 0\.5"):
        replace(case, temperature=0.5).statistics()
    with pytest.raises(ValueError, match="ascending"):
        replace(case, draft_vocab=case.draft_vocab.flip(0)).statistics()
    with pytest.raises(ValueError, match="not asked for 'forward_kl'"):
        Objective({"forward_kl": 1.0})(case.statistics(frozenset()), torch.ones(case.shape, dtype=torch.bool))


def test_the_recipe_knows_the_same_names() -> None:
    assert set(LOSS_NAMES) == set(LOSSES)
