"""Products of few rows: right against float64, a row's result the same whatever rows come with it."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from specalign.kernels import linear

SIZES = [(1, 8), (2, 8), (7, 13), (64, 32), (65, 31), (192, 576), (33, 1536), (18, 2053)]


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows(outputs: int, inputs: int, bias: bool) -> None:
    torch.manual_seed(outputs)
    weight, x = torch.randn(outputs, inputs), torch.randn(36, inputs)
    offset = torch.randn(outputs) if bias else None
    exact = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 20, 32, 33):
        got = linear.few_rows(x[:rows], weight, offset)
        torch.testing.assert_close(got.double(), exact[:rows], rtol=1e-5, atol=1e-4)
        for dtype in (torch.bfloat16, torch.int8):
            matrix = linear.round_weight(weight, dtype, offset)
            read = linear.rounded_rows(x[:rows]) if linear.eight_bits(matrix) else x[:rows]
            wide = None if offset is None else offset.double()
            close = F.linear(read.double(), matrix.dense(torch.float64), wide)
            found = linear.few_rows(x[:rows], *matrix).double()
            torch.testing.assert_close(found, close, rtol=1e-5, atol=1e-4)
        if linear.rows_library() is not None and rows <= linear.MOST_ROWS:
            for kept in (linear.Matrix(weight, offset), matrix):
                alone = torch.cat([linear.few_rows(x[i : i + 1], *kept) for i in range(rows)])
                assert torch.equal(linear.few_rows(x[:rows], *kept), alone)
    for dtype in (torch.bfloat16, torch.float64):  # as torch multiplies them
        own, wide = weight.to(dtype), x[:3].to(dtype)
        found = linear.few_rows(wide, own, None if offset is None else offset.to(dtype))
        close = F.linear(wide.double(), own.double(), None if offset is None else offset.double())
        torch.testing.assert_close(found.double(), close, rtol=2e-2, atol=5e-2)
        assert found.dtype == dtype
    assert linear.few_rows(x[:6].view(2, 3, inputs), weight).shape == (2, 3, outputs)
    assert linear.few_rows(x[:0], weight).shape == (0, outputs)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_is_so_for_int8_too(wrong: float) -> None:
    matrix, x = linear.round_weight(torch.randn(9, 130), torch.int8), torch.randn(3, 130)
    x[1, 77] = wrong
    for rows in (x, x.repeat(12, 1)):
        y = linear.few_rows(rows, *matrix)
        assert not y[1].isfinite().any()
        assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("on", [False, True])
def test_int8_with_rows_rounded_and_not(on: bool, round_rows: Callable[[bool], None]) -> None:
    """The processor chooses; either way is that of the definition, and sums of rounded rows are exact."""
    round_rows(on)
    torch.manual_seed(0)
    matrix, x = linear.round_weight(torch.randn(7, 200), torch.int8), torch.randn(40, 200)
    assert linear.eight_bits(matrix) == on
    read = linear.rounded_rows(x) if on else x
    exact = F.linear(read.double(), matrix.dense(torch.float64))
    near, few = 1e-5 if on else 1e-4, linear.few_rows(x[:8], *matrix)
    torch.testing.assert_close(few.double(), exact[:8], rtol=near / 10, atol=near)
    torch.testing.assert_close(linear.few_rows(x, *matrix).double(), exact, rtol=1e-5, atol=1e-4)


def test_the_largest_numbers_of_eight_bits_fit(round_rows: Callable[[bool], None]) -> None:
    """Of every sign: two products are added in sixteen bits by AVX2."""
    round_rows(True)
    signs = torch.tensor([[1.0, 1], [-1, -1], [1, -1], [-1, 1]]).repeat(1, 100)
    y = linear.few_rows(signs, *linear.round_weight(signs, torch.int8))
    torch.testing.assert_close(y, signs @ signs.T, rtol=1e-6, atol=0)


def test_a_wide_int8_weight_meets_whole_rows(round_rows: Callable[[bool], None]) -> None:
    """Room for rounded rows is on the stack."""
    round_rows(True)
    narrow, wide = (
        linear.round_weight(torch.randn(2, size), torch.int8) for size in (1 << 14, (1 << 14) + 1)
    )
    assert linear.eight_bits(narrow) and not linear.eight_bits(wide)
    for matrix in (narrow, wide):
        x = torch.randn(32, matrix.weight.shape[1])
        read = linear.rounded_rows(x) if matrix is narrow else x
        wanted = F.linear(read.double(), matrix.dense(torch.float64))
        found = linear.few_rows(x, *matrix).double()
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("there", [True, False])
def test_many_rows(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through oneDNN where torch has its operator, and without: any strides, in fp32 to its rounding, other types as they are."""
    if not there:
        monkeypatch.setattr(linear, "_one_dnn", lambda: False)
    torch.manual_seed(0)
    wide, tall = torch.randn(3, 40, 48), torch.randn(24, 70)
    strided, x = torch.randn(70, 48)[:, ::2], wide[:, :, ::2]
    for weight, bias in ((strided, torch.randn(70)), (tall.t(), None)):
        got = linear.many_rows(x, weight, bias)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)
        exact = F.linear(x.double(), weight.double())
        assert torch.equal(linear.many_rows(x.double(), weight.double()), exact)


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 32, 40])
def test_weights_that_are_bf16_stay_so_and_change_no_bit(rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = torch.randn(33, 40).bfloat16().float(), torch.randn(rows, 40)
    kept = linear.RowsLinear(weight, None)
    assert kept.weight.dtype == torch.bfloat16
    assert torch.equal(kept(x), linear.few_rows(x, weight))
    rounded = linear.RowsLinear(weight, None, torch.int8)
    assert torch.equal(rounded(x), linear.few_rows(x, *linear.round_weight(weight, torch.int8)))
    assert not any(p.requires_grad for layer in (kept, rounded) for p in layer.parameters())
    weight[32, 39] += 2**-12  # one number that bf16 does not have
    assert linear.RowsLinear(weight, None).weight.dtype == torch.float32


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "rows_library", lambda: None)
    kind = linear.fast_linear(torch.float32, torch.device("cpu"))
    assert kind is (linear.PackedLinear if torch.backends.mkldnn.is_available() else None)
    assert linear.fast_linear(torch.float16, torch.device("cpu")) is None
    assert linear.fast_linear(torch.float32, torch.device("meta")) is None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 24)])
def test_the_packed_form_is_the_layer(bias: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 70), torch.randn(5, 70)
    layer = linear.PackedLinear(weight, bias)
    torch.testing.assert_close(layer(x), F.linear(x, weight, bias), rtol=1e-5, atol=1e-4)
    assert torch.equal(layer.weight, weight) and layer.weight.shape == (24, layer.in_features)


def test_matrices_copied_together_share_one_memory() -> None:
    one = linear.round_weight(torch.randn(3, 5), torch.int8, torch.randn(3))
    other = linear.Matrix(torch.randn(7, 2))
    found = linear.copy_together(one, other)
    for matrix, copied in zip((one, other), found, strict=True):
        assert torch.equal(copied.weight, matrix.weight) and copied[1:] == matrix[1:]
        assert copied.weight.data_ptr() != matrix.weight.data_ptr()
    first, second = (copied.weight.untyped_storage().data_ptr() for copied in found)
    assert first == second


def test_the_largest_number_of_each_row_becomes_127() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(4, 64).bfloat16(), torch.randn(4)
    weight[2] = 0
    kept = linear.round_weight(weight, torch.int8, bias)
    assert kept.scale is not None and kept.weight.abs().amax(1).tolist() == [127, 127, 0, 127]
    assert torch.equal(kept.scale[:2], weight[:2].float().abs().amax(1) / 127)
    error = (kept.dense(torch.float64) - weight.double()).abs()
    assert (error <= 0.5001 * kept.scale[:, None]).all()
    assert kept.dense(torch.bfloat16).dtype == torch.bfloat16
    rows = torch.randn(2, 3, 64)
    assert torch.equal(linear.rounded_rows(rows).view(6, 64), linear.rounded_rows(rows.view(6, 64)))
    assert kept.bias is bias is linear.round_weight(weight, torch.float32, bias).bias
    assert kept.scale.dtype == torch.float32 and kept.weight.dtype == torch.int8
