"""Values and gradients of every statistic against a float64 reference: kinds of rows, chunks, dtypes, shapes, autocast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.logits import DIFFERENTIABLE, KINDS, Case, make


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


def test_autocast_changes_nothing() -> None:
    case = make(seed=12, rank=2)
    plain = case.statistics()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = case.statistics()
        (grad,) = torch.autograd.grad(cast.forward_kl.sum(), case.rows.hidden_RD)
    assert torch.equal(plain.forward_kl, cast.forward_kl)
    assert torch.equal(grad, torch.autograd.grad(plain.forward_kl.sum(), case.rows.hidden_RD)[0])


@pytest.mark.parametrize("kind", ["markov", "pruned_markov"])
def test_gradients_are_rounded_where_autocast_rounds_all_others(kind: str) -> None:
    """A head in bf16 under autocast, which is how a processor with bf16 products trains: values as without, gradients of 16-bit factors."""
    case = make(seed=13, dtype=torch.bfloat16, **KINDS[kind])
    plain = case.statistics()
    want = torch.autograd.grad(plain.forward_kl.sum(), case.leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = case.statistics()
        got = torch.autograd.grad(cast.forward_kl.sum(), case.leaves)
    assert torch.equal(plain.forward_kl, cast.forward_kl)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)
    assert not torch.equal(got[-1], want[-1])  # the Markov basis is in fp32
