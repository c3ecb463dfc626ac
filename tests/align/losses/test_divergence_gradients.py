"""Values and gradients of every statistic against a float64 reference: kinds of rows, chunks, dtypes, shapes, autocast."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from align.losses.divergence_gradients import target_places
from align.losses.divergences import DraftRows, logit_statistics, row_statistics
from tests.logits import DIFFERENTIABLE, KINDS, Case, make


def check(
    case: Case, name: str, chunk_rows: int = 1024, rtol: float = 1e-4, atol: float = 5e-6
) -> None:
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


def test_bf16_inputs_are_computed_in_fp32() -> None:
    for name in DIFFERENTIABLE:
        check(make(seed=5, kept=9, rank=3, dtype=torch.bfloat16), name)


@pytest.mark.parametrize("kind", KINDS)
def test_constants_match_float64(kind: str) -> None:
    case = make(seed=3, **KINDS[kind])
    want, got = case.reference()[0], case.statistics()
    for name in ("acceptance", "p_label", "match", "greedy_label"):
        torch.testing.assert_close(getattr(got, name).double(), want[name], rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 1024), (torch.float32, 4)], ids=str)
def test_autocast_rounds_gradients_of_a_head_in_its_type(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else, though it would round torch's own products."""
    monkeypatch.setattr("specalign.kernels.linear._one_dnn", lambda: False)
    case = make(seed=5, kept=9, rank=3, dtype=dtype)
    for name in ("hidden_RD", "z_Rr"):
        setattr(case.rows, name, getattr(case.rows, name).detach().float().requires_grad_())
    for name in DIFFERENTIABLE:
        exact = getattr(case.statistics(chunk), name)
        expected = torch.autograd.grad(exact.sum(), case.leaves)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = getattr(case.statistics(chunk), name)
        assert torch.equal(mixed, exact)
        for a, e in zip(torch.autograd.grad(mixed.sum(), case.leaves), expected, strict=True):
            if dtype == torch.float32:
                assert torch.equal(a, e)
            else:
                assert torch.equal(a, a.bfloat16().float()) and not torch.equal(a, e)
                torch.testing.assert_close(a, e, rtol=2**-6, atol=2**-7 * float(e.abs().max()))


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


def test_statistics_of_logits_are_those_of_rows() -> None:
    """Values and gradients, where the two heads are one."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(9, 6, generator=generator), torch.randn(30, 6, generator=generator)
    text = torch.randn(5, 6, generator=generator)
    places = target_places(text, torch.tensor([3, 7, 29, 0, 11]), lambda h: h @ head.T)
    where = torch.tensor([0, 0, 1, 2, 3, 4, 4, 1, 2])
    grads = []
    for direct in (True, False):
        own = hidden.clone().requires_grad_()
        if direct:
            s = row_statistics(DraftRows(own, where, where.numpy()), places, head, None, (9,))
        else:
            s = logit_statistics(own @ head.T, where, places, head)
        total = sum((i + 1) * getattr(s, n).sum() for i, n in enumerate(DIFFERENTIABLE))
        total.backward()
        grads.append((s, own.grad))
        assert not any(x.requires_grad for x in (s.acceptance, s.p_label, s.match, s.greedy_label))
    for name in (*DIFFERENTIABLE, "acceptance", "p_label", "match", "greedy_label"):
        torch.testing.assert_close(getattr(grads[0][0], name), getattr(grads[1][0], name))
    torch.testing.assert_close(grads[0][1], grads[1][1], atol=1e-5, rtol=1e-4)


def saved_bytes(case: Case, chunk_rows: int) -> int:
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        case.statistics(chunk_rows)
    return sum(sizes.values())


def test_memory_does_not_grow_with_rows_times_vocabulary() -> None:
    few, many = (make(anchors=a, block=4, vocabulary=2000, kept=1500) for a in (16, 160))
    grown = saved_bytes(many, 16) - saved_bytes(few, 16)
    assert grown < 576 * 200, "a few numbers a row, not a row of the vocabulary"
    assert saved_bytes(many, 10**6) > 640 * 1500 * 4  # the measurement sees one large chunk


@pytest.mark.parametrize(("temperature", "chunk"), [(None, 256), (2.0, 3)])
def test_places_hold_p(temperature: float | None, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    following = torch.randint(0, 11, (7,), generator=generator)
    before = hidden.clone()
    options = {} if temperature is None else {"temperature": temperature}
    places = target_places(hidden, following, lambda h: h @ head.T, chunk=chunk, **options)
    temperature = temperature or 1.0
    scaled = hidden.double() @ head.double().T / temperature
    torch.testing.assert_close(places.log_z_P.double(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)
    chosen = scaled.log_softmax(-1).gather(-1, following[:, None])[:, 0]
    torch.testing.assert_close(places.log_p_next_P.double(), chosen, rtol=1e-5, atol=1e-5)
    assert torch.equal(places.best_P, scaled.argmax(-1)) and torch.equal(places.next_P, following)
    assert places.temperature == temperature and torch.equal(places.hidden_PD, before)
