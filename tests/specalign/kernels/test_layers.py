"""Layers in one call: right against float64, a row's numbers the same whatever rows come with it, several requests at once."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from decode.speculation.tree import ancestors
from specalign.kernels.layers import Convolution, LayerStack, Memory, Rows, Weights
from specalign.kernels.linear import Matrix, round_weight, rows_library
from specalign.kernels.repeated import RepeatedCall
from specalign.lm.attention import rotate

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")


BLOCK = 4


def random_stack(
    heads: int = 6, kv_heads: int = 2, head_width: int = 24, inner: int = 37, width: int = 40, bias: bool = True,
    norms: bool = True, dtype: torch.dtype = torch.float32, layers: int = 2, groups: int = 0,
) -> LayerStack:  # fmt: skip
    torch.manual_seed(heads + inner)

    def matrix(out: int, into: int) -> Matrix:
        weight = torch.randn(out, into) / into**0.5
        return round_weight(weight, dtype, torch.randn(out) if bias else None)

    def norm(size: int) -> Tensor:
        return torch.rand(size) + 0.5

    def convolution() -> Convolution | None:
        delta = round_weight(torch.randn(4 * groups, width) / width**0.5, dtype)
        return Convolution(delta, torch.randn(2, 2, width) / 2) if groups else None

    def weights() -> Weights:
        q, kv = heads * head_width, kv_heads * head_width
        sizes = [(q, width), (kv, width), (kv, width), (width, q)]
        sizes += [(inner, width), (inner, width), (width, inner)]
        matrices = [matrix(*size) for size in sizes]
        own = (norm(head_width), norm(head_width)) if norms else (None, None)
        return Weights(*matrices, norm(width), norm(width), *own, convolution(), convolution())

    made, scale = [weights() for _ in range(layers)], head_width**-0.5
    sizes = (heads, kv_heads, head_width)
    return LayerStack(made, *sizes, scale, 1e-5, norm(width), 1e-6, block=BLOCK)


Past = Sequence[tuple[Tensor, Tensor]]
Computed = tuple[Tensor, list[Tensor], Past]


def plainly(
    stack: LayerStack, x: Tensor, cos: Tensor, sin: Tensor, past: Past, see: Tensor
) -> Computed:
    """The same in float64, one request: last hidden states, the layers' outputs, all keys and values (S, kv_heads, width)."""
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    outputs, kept = [], []
    rms = lambda t, weight, eps: F.rms_norm(t, weight.shape, weight.double(), eps)  # noqa: E731
    for weights, (old_keys, old_values) in zip(stack.weights, past, strict=True):
        matrices = {f.name: getattr(weights, f.name) for f in fields(weights)[:7]}
        w = {name: (m.dense(torch.float64), None) for name, m in matrices.items()}
        w |= {n: (w[n][0], m.bias.double()) for n, m in matrices.items() if m.bias is not None}
        split = lambda t: t.unflatten(-1, (-1, stack.head_width))  # noqa: E731
        n, after = around(weights.attention_conv, rms(x, weights.before_attention, stack.eps))
        q, k, v = (split(F.linear(n, *w[name])) for name in ("q", "k", "v"))
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms(q, weights.q_norm, stack.head_eps), rms(k, weights.k_norm, stack.head_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        keys, values = torch.cat((old_keys.double(), k)), torch.cat((old_values.double(), v))
        kept.append((keys, values))
        groups = stack.heads // stack.kv_heads
        scores = torch.einsum("rhd,shd->hrs", q, keys.repeat_interleave(groups, 1)) * stack.scale
        mix = scores.masked_fill(~see, -torch.inf).softmax(-1)
        out = torch.einsum("hrs,shd->rhd", mix, values.repeat_interleave(groups, 1))
        x = x + after(F.linear(out.flatten(1), *w["o"]))
        n, after = around(weights.mlp_conv, rms(x, weights.before_mlp, stack.eps))
        x = x + after(F.linear(F.silu(F.linear(n, *w["gate"])) * F.linear(n, *w["up"]), *w["down"]))
        outputs.append(x)
    assert stack.last_norm is not None
    return rms(x, stack.last_norm, stack.eps), outputs, kept


def around(convolution: Convolution | None, x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """What a sublayer reads of its normed rows, and what becomes of its output."""
    if convolution is None:
        return x, lambda out: out
    groups = len(convolution.delta.weight) // 4
    delta = F.linear(x, convolution.delta.dense(torch.float64)).view(len(x), 2, 2, groups)
    weights = convolution.offset.double() + delta.repeat_interleave(x.shape[1] // groups, dim=3)

    def mixed(rows: Tensor, which: int) -> Tensor:
        before = torch.cat((torch.zeros_like(rows[:1]), rows[:-1]))
        before[::BLOCK] = 0
        return rows + weights[:, which, 0] * rows + weights[:, which, 1] * before

    return mixed(x, 0), lambda out: mixed(out, 1)


class Request:
    """A request with random keys and values before its rows."""

    def __init__(
        self, stack: LayerStack, past: int, rows: int, see: Tensor | None = None, seed: int = 0
    ) -> None:
        torch.manual_seed(seed + past)
        size = (1, stack.kv_heads, past + rows + 3, stack.head_width)
        self.keys = [torch.randn(size) for _ in stack.weights]
        self.values = [torch.randn(size) for _ in stack.weights]
        self.rows = Rows(Memory(self.keys, self.values), past, rows, see)
        self.x = torch.randn(rows, stack.width)
        self.cos, self.sin = torch.randn(2, rows, stack.head_width)

    def expected(self, stack: LayerStack) -> Computed:
        past, count = self.rows.past, self.rows.rows
        see = torch.ones(count, past + count, dtype=torch.bool).tril(past)
        if self.rows.see is not None:
            see[:, past:] = self.rows.see
        pairs = zip(self.keys, self.values, strict=True)
        old = [tuple(t[0, :, :past].transpose(0, 1) for t in pair) for pair in pairs]
        return plainly(stack, self.x, self.cos, self.sin, old, see)


def joined(requests: list[Request]) -> list[Tensor]:
    """Rows and tables of several."""
    return [torch.cat([getattr(r, name) for r in requests]) for name in ("x", "cos", "sin")]


TREE = ancestors((-1, -1, 0, 1))
SHAPES = [
    {}, {"bias": False, "norms": False}, {"dtype": torch.bfloat16}, {"dtype": torch.int8}, {"heads": 4, "kv_heads": 4, "head_width": 8},
    {"heads": 8, "kv_heads": 1, "head_width": 64}, {"head_width": 40, "inner": 64, "width": 33},
    {"groups": 5, "dtype": torch.bfloat16}, {"groups": 1, "bias": False, "dtype": torch.int8}, {"groups": 3, "width": 33},
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("past", "rows", "see"),
    [(0, 1, None), (5, 4, None), (254, 5, TREE), (600, 7, None), (1, 32, None)],
)
def test_right_against_float64(
    shape: dict[str, int],
    past: int,
    rows: int,
    see: Tensor | None,
    round_rows: Callable[[bool], None],
) -> None:
    round_rows(False)
    stack = random_stack(**shape)  # type: ignore[arg-type]
    request = Request(stack, past, rows, see)
    wanted, outputs, kept = request.expected(stack)
    before = request.x.clone()
    hidden, taps = stack(request.x, request.cos, request.sin, [request.rows], taps=(1, 0, 1))
    assert torch.equal(request.x, before)
    torch.testing.assert_close(hidden.double(), wanted, rtol=2e-4, atol=2e-4)
    assert taps is not None
    for tap, output in zip(taps, (outputs[1], outputs[0], outputs[1]), strict=True):
        torch.testing.assert_close(tap.double(), output, rtol=2e-4, atol=2e-4)
    for i, both in enumerate(kept):
        for mine, own in zip((request.keys[i], request.values[i]), both, strict=True):
            stored = mine[0, :, : past + rows].transpose(0, 1).double()
            torch.testing.assert_close(stored, own, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("shape", [{}, {"groups": 5}])
def test_int8_of_rounded_rows(shape: dict[str, int], round_rows: Callable[[bool], None]) -> None:
    """Rows are rounded one by one, by 1/254 of their largest number at most."""
    round_rows(True)
    stack = random_stack(dtype=torch.int8, **shape)  # type: ignore[arg-type]
    request = Request(stack, 126, 5)
    wanted, _, _ = request.expected(stack)
    hidden, _ = stack(request.x, request.cos, request.sin, [request.rows])
    assert not torch.allclose(hidden.double(), wanted, rtol=2e-4, atol=2e-4)
    assert (hidden - wanted).norm() < 0.03 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_gives_the_same_numbers_in_any_batch(threads: int, dtype: torch.dtype) -> None:
    """To the bit, across the parts of the keys: plain decoding and verification of a chain can't part."""
    stack, count = random_stack(dtype=dtype), 9
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        many = Request(stack, 124, count)
        together, _ = stack(many.x, many.cos, many.sin, [many.rows])
        alone = Request(stack, 124, count)
        for i in range(count):
            tables = (x[i : i + 1] for x in (alone.x, alone.cos, alone.sin))
            one, _ = stack(*tables, [Rows(alone.rows.memory, 124 + i, 1)])
            assert torch.equal(one[0], together[i])
        for mine, its in zip(many.keys + many.values, alone.keys + alone.values, strict=True):
            assert torch.equal(mine, its)
        others = [Request(stack, 40, 3), Request(stack, 124, count), Request(stack, 0, 5, TREE)]
        batch, _ = stack(*joined(others), [r.rows for r in others])
        assert torch.equal(batch[3 : 3 + count], together)
        tree = Request(stack, 0, 5, TREE)
        assert torch.equal(batch[3 + count :], stack(tree.x, tree.cos, tree.sin, [tree.rows])[0])
    finally:
        torch.set_num_threads(before)


def test_what_a_row_does_not_see_is_nothing_to_it() -> None:
    """Even where it holds no numbers: memory behind the rows, and siblings."""
    stack = random_stack()
    request = Request(stack, 5, 5, TREE)
    wanted, _ = stack(request.x, request.cos, request.sin, [request.rows])
    for t in (*request.keys, *request.values):
        t[:, :, 10:] = torch.nan
    x = request.x.clone()
    x[4] = 1e30  # seen by itself alone
    got, _ = stack(x, request.cos, request.sin, [request.rows])
    assert torch.equal(got[:4], wanted[:4])


@pytest.mark.parametrize("past", [1, 5, 257, 600])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_makes_no_number(past: int, bad: float) -> None:
    """As torch's softmax: wherever the key lies, in a row that sees one key alone too."""
    stack = random_stack(layers=1, norms=False)
    for place in sorted({0, past // 2, past - 1}):
        request = Request(stack, past, 2)
        request.keys[0][0, :, place] = bad
        assert request.expected(stack)[0].isnan().all()
        assert stack(request.x, request.cos, request.sin, [request.rows])[0].isnan().all()
    request = Request(stack, 0, 2)
    request.x[0] = torch.nan
    got = stack(request.x, request.cos, request.sin, [request.rows])[0]
    assert got.isnan().all()


@pytest.mark.parametrize("past", [0, 5, 256, 600])
def test_rows_apart_leave_the_memory_as_it_was(past: int) -> None:
    """Drafts that read the target's keys write nothing there; beside another request too."""
    stack = random_stack()
    see = torch.block_diag(torch.ones(3, 3), torch.ones(2, 2)).bool()
    request, other = Request(stack, past, 5, see, seed=1), Request(stack, 7, 2)
    wanted, _, _ = request.expected(stack)
    before = [t.clone() for t in (*request.keys, *request.values)]
    rows = Rows(request.rows.memory, past, 5, see, apart=True)
    hidden, _ = stack(*joined([other, request]), [other.rows, rows])
    torch.testing.assert_close(hidden[2:].double(), wanted, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(hidden[:2].double(), other.expected(stack)[0], rtol=2e-4, atol=2e-4)
    assert all(map(torch.equal, before, (*request.keys, *request.values)))


def test_every_row_is_given_what_a_state_gives() -> None:
    stack = random_stack(bias=False, norms=False)
    norm, matrix = torch.rand(40) + 0.5, torch.randn(40, 40) / 40**0.5
    stack = replace(stack, state=(norm, Matrix(matrix)), _held=[])
    request, state = Request(stack, 9, 4), 5 * torch.randn(40)
    rows = replace(request.rows, apart=True)
    given = matrix @ F.rms_norm(state, (40,), norm, stack.eps)
    expected, _ = stack(request.x + given, request.cos, request.sin, [rows])
    found, _ = stack(request.x, request.cos, request.sin, [rows], state_D=state)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repeated_calls_give_the_same_bits_and_write_nothing(dtype: torch.dtype) -> None:
    """At any past, after another token every time; what does not fit is refused."""
    stack = random_stack(bias=False, norms=False)
    state = (torch.rand(40) + 0.5, Matrix(torch.randn(40, 40) / 40**0.5))
    stack = replace(stack, state=state, _held=[])
    request = Request(stack, 300, 4)
    memory, see = request.rows.memory, torch.rand(4, 4) > 0.3
    see.fill_diagonal_(True)
    block, embedding = torch.randn(4, 40), torch.randn(6, 40).to(dtype)
    repeated = RepeatedCall(stack, memory, see, block, embedding)
    before = [t.clone() for t in memory._held]
    tables_2Sw = torch.randn(2, 310, 24)
    for past, token in ((300, 5), (3, 0), (257, 3), (0, 3)):
        state = torch.randn(1, 40)
        cos, sin = tables_2Sw[:, past : past + 4]
        x = torch.cat((embedding[token][None], block[1:]))
        expected, _ = stack(x, cos, sin, [Rows(memory, past, 4, see, apart=True)], state_D=state[0])
        assert torch.equal(repeated(token, state, tables_2Sw, past), expected)
        tables_2Sw = tables_2Sw.clone() if past == 3 else tables_2Sw
    assert all(map(torch.equal, memory._held, before))
    tables = tables_2Sw
    wrongs = [(0, state.double(), tables, 0), (0, state, tables[:, :, ::2], 0)]
    for wrong in (*wrongs, (0, state, tables, 307), (6, state, tables, 0)):
        with pytest.raises(ValueError, match=r"contiguous|positions before|the token"):
            repeated(*wrong)
    with pytest.raises(ValueError, match="belongs"):
        RepeatedCall(stack, memory, see, block, embedding[:, :39])
