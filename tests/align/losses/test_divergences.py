"""Statistics of draft rows against a float64 reference, values and gradients; chunks, vocabularies, dtypes, memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from align.common.errors import UserError
from align.losses import divergences as module
from align.losses.divergences import DIVERGENCES, DraftRows, logit_statistics, row_statistics, target_places
from tests.logits import DIFFERENTIABLE, Case, make


def test_statistics_of_logits_are_those_of_rows() -> None:
    """Values and gradients, where the two heads are one."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 6, generator=generator), torch.randn(30, 6, generator=generator)
    text = torch.randn(5, 6, generator=generator)
    places = target_places(text, torch.tensor([3, 7, 29, 0, 11]), lambda h: h @ head.T)
    where = torch.tensor([0, 0, 1, 2, 3, 4, 4, 1, 2])
    names = frozenset(DIVERGENCES)
    grads = []
    for direct in (True, False):
        own = hidden.clone().requires_grad_()
        if direct:
            s = row_statistics(DraftRows(own, where), places, head, None, (9,), names)
        else:
            s = logit_statistics(own @ head.T, where, places, head, names)
        total = sum((i + 1) * getattr(s, n).sum() for i, n in enumerate(["log_q_label", *DIVERGENCES]))
        total.backward()
        grads.append((s, own.grad))
    for name in ("log_q_label", "acceptance", "p_label", "match", "greedy_label", *DIVERGENCES):
        torch.testing.assert_close(getattr(grads[0][0], name), getattr(grads[1][0], name))
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-5, rtol=1e-4)
    with pytest.raises(UserError, match="unknown divergence 'kl'"):
        logit_statistics(hidden @ head.T, where, places, head, frozenset({"kl"}))


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
