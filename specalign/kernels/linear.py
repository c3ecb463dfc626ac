"""Linear layers for few rows on a CPU: decoding one token, or verifying a short draft, reads all
weights to multiply a few rows, and torch's default product is optimised for many.

SmolLM2-135M's layers over 5 rows, two AVX2 cores: torch 48 ms, oneDNN's packed form 25, `rows.c`
18. In fp32 `rows.c` is used where it was compiled and the processor has AVX2, else the packed form;
in bf16 the packed form. `rows.c` sums a row in the same order whatever other rows come with it.
"""

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.kernels.pages import together

MOST_ROWS = 32
"""With more rows, `rows.c` has more arithmetic than it can hide behind the reading."""

LIBRARIES = ("_rows512", "_rows")
"""The same files, compiled for AVX512 and for AVX2."""


@cache
def rows_library() -> Any:
    """The fastest of `LIBRARIES` for this processor; None without a compiler or AVX2."""
    return next(
        (library for name in LIBRARIES if (library := open_library(name)) is not None), None
    )


_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "matrix_product": ([_P] * 3 + [_N] * 3, None),
    "rows_rounded": ([_N], ctypes.c_int),
    "matrix_row": ([_P, _N, _N, _P], None),
    "layers_layout": ([], _N),
    "layers_scratch": ([_P, _P, _N], _N),
    "layers_forward": ([_P] * 6 + [_N, _P, _P], None),
    "tree_scratch": ([_P, _N, _N], _N),
    "draft_tree": ([_P, _P, _N, _N, _N, _F] + [_P] * 4, _N),
    "draw_chain": ([_P, _P, _N, _N, _F] + [_P] * 4, None),
    "largest_of_rows": ([_P, _N, _N, _P], None),
    "verify_chain": ([_P] * 5, _N),
}
"""Arguments and result of each function of the library."""


@cache
def open_library(name: str) -> Any:
    """One of `LIBRARIES`; None where it was not compiled, or not for this processor."""
    paths = [Path(__file__).with_name(f"{name}{suffix}") for suffix in EXTENSION_SUFFIXES]
    try:
        path = next(path for path in paths if path.is_file())
        library = ctypes.CDLL(str(path))  # torch is loaded: they share one OpenMP
        for function, (arguments, result) in _FUNCTIONS.items():
            getattr(library, function).argtypes = arguments
            getattr(library, function).restype = result
        return library if library.rows_available() else None
    except (StopIteration, OSError, AttributeError):
        return None


class MatrixFields(ctypes.Structure):
    """`Matrix` of lanes.h."""

    _fields_ = [*((name, _P) for name in ("weight", "bias", "scale")), ("kind", _N)]


_TINY = 1e-30
"""A row of no larger number is rounded to zeros (bytes.h)."""

KINDS = (torch.float32, torch.bfloat16, torch.int8)
"""Of a weight's numbers, by their number in lanes.h."""


class Matrix(NamedTuple):
    """A weight (out, in) in fp32, bf16 or int8, its bias (out,), and what the rows of an int8
    weight are multiplied by (out,), both in fp32."""

    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in this type, whatever it is kept in."""
        weight = self.weight.to(dtype)
        return weight if self.scale is None else weight * self.scale[:, None].to(dtype)


def round_weight(weight: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Matrix:
    """A weight (out, in) in this type; in int8 the largest number of each row becomes ±127."""
    if dtype != torch.int8:
        return Matrix(weight.to(dtype), bias)
    scale = weight.float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return Matrix((weight.float() / scale[:, None]).round().to(torch.int8), bias, scale)


def copy_together(*matrices: Matrix) -> list[Matrix]:
    """The same matrices with their weights copied into one piece of memory (`pages.together`)."""
    places = together([matrix.weight for matrix in matrices])
    pairs = zip(matrices, places, strict=True)
    return [matrix._replace(weight=at.copy_(matrix.weight)) for matrix, at in pairs]


def eight_bits(matrix: Matrix) -> bool:
    """Whether `rows.c` rounds the rows to eight bits too: int8 weights of up to 16,384 columns."""
    if rows_library() is None or matrix.weight.dtype != torch.int8:
        return False
    return bool(rows_library().rows_rounded(matrix.weight.shape[1]))


def rounded_rows(x: Tensor) -> Tensor:
    """Rows (…, in) rounded to ±127 steps of their largest number, as `rows.c` does."""
    most = x.abs().amax(dim=-1, keepdim=True)
    return (x * torch.where(most > _TINY, 127 / most, 0.0)).round() * (most / 127)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` without gradients, by `rows.c` where it applies.

    `x` in fp32 may be multiplied with a weight in bf16, or in int8 with a `scale` for each row
    (`round_weight`); sums are fp32. Where `eight_bits`, x is round_weight as well, and sums are exact.
    """
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    fits = 0 < rows <= MOST_ROWS and weight.is_contiguous() and weight.device.type == "cpu"
    known = x.dtype == torch.float32 and weight.dtype in KINDS
    if not fits or not known or rows_library() is None:
        matrix = Matrix(weight, bias, scale)
        return many_rows(rounded_rows(x) if eight_bits(matrix) else x, matrix.dense(x.dtype), bias)
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], outputs))
    where = [None if t is None else t.data_ptr() for t in (weight, bias, scale)]
    given = MatrixFields(*where, KINDS.index(weight.dtype))
    rows_library().matrix_product(
        ctypes.byref(given), x.data_ptr(), y.data_ptr(), rows, inputs, outputs
    )
    return y


def many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` without gradients; in fp32 on a CPU by oneDNN where it applies,
    which takes half the time of torch's own product (MKL) on AMD's processors.

    On two dimensions: oneDNN's bf16 product of a cut (1, L, D) takes 15 times as long as of (L, D).
    """
    rows = x.reshape(-1, x.shape[-1])
    known = x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _one_dnn()
    y = _pointwise(rows, weight, bias) if known else F.linear(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@cache
def _one_dnn() -> bool:
    """Whether torch's operator for oneDNN's products is there and right."""
    x = torch.linspace(-1, 1, 40 * 32).view(40, 32)
    weight = torch.linspace(-1, 1, 32 * 48).view(32, 48).t()
    with torch.autocast("cpu", enabled=False):  # the first call may be within it
        try:
            found = [_pointwise(x, w, None) for w in (weight, weight.contiguous())]
        except (RuntimeError, NotImplementedError, AttributeError):
            return False
        return all(torch.allclose(y, F.linear(x, weight), atol=1e-5) for y in found)


def _frozen(tensor: Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)


class RowsLinear(nn.Module):
    """A linear layer in fp32 without gradients, through `rows.c`. A weight whose numbers are all
    bf16 is kept in bf16, with the same result to the bit; `round_to`, bf16 or int8, rounds others.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, round_to: torch.dtype | None = None
    ) -> None:
        super().__init__()
        kept = round_weight(weight.detach(), round_to or torch.bfloat16)
        if round_to is None and not torch.equal(kept.weight.float(), weight):
            kept = Matrix(weight.detach())
        self.weight = nn.Parameter(kept.weight.contiguous(), requires_grad=False)
        self.bias = _frozen(None if bias is None else bias.contiguous())
        self.scale = _frozen(kept.scale)
        self.out_features, self.in_features = weight.shape

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with."""
        return Matrix(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, *self.matrix)


class RowsConv1D(RowsLinear):
    """The same for transformers' `Conv1D`: `weight` is (in, out), in memory (out, in)."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, round_to: torch.dtype | None = None
    ) -> None:
        super().__init__(weight.t(), bias, round_to)
        self.weight = nn.Parameter(self.weight.t(), requires_grad=False)
        self.nx, self.nf = weight.shape

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with."""
        return Matrix(self.weight.t(), self.bias, self.scale)


def is_linear(module: nn.Module) -> bool:
    """Whether it is a layer that `speed_up_linears` may replace."""
    return type(module) is nn.Linear or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, by its name: nothing here needs transformers."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class PackedLinear(nn.Module):
    """A linear layer without gradients from a copy of the weight in oneDNN's layout. `weight` stays
    reachable, unpacked, under the name that `nn.Linear` gives it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 8) -> None:
        super().__init__()
        self.weight, self.bias = _frozen(weight), _frozen(bias)
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)

    def forward(self, x: Tensor) -> Tensor:
        return _pointwise(x, self.packed, self.bias)


def fast_linear(
    dtype: torch.dtype, device: torch.device
) -> type[RowsLinear] | type[PackedLinear] | None:
    """The fastest layer class for few rows on this machine, tested once; None = torch's own."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    if dtype == torch.float32 and rows_library() is not None and _right(RowsLinear, dtype):
        return RowsLinear
    packed = torch.backends.mkldnn.is_available() and _right(PackedLinear, dtype)
    return PackedLinear if packed else None


@cache
def _right(kind: type[RowsLinear] | type[PackedLinear], dtype: torch.dtype) -> bool:
    weight = torch.linspace(-1, 1, 64 * 32).view(64, 32).to(dtype)
    rows = torch.linspace(-1, 1, 3 * 32).view(3, 32).to(dtype)
    try:
        got = kind(weight, None)(rows)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    tolerance = 1e-5 if dtype == torch.float32 else 0.2
    return torch.allclose(got.float(), F.linear(rows, weight).float(), atol=tolerance)
