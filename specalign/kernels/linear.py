"""Linear layers for few rows on a CPU: decoding one token, or verifying a short draft, reads all
weights to multiply a few rows, and torch's default product is optimised for many.

SmolLM2-135M's layers over 5 rows, two AVX2 cores: torch 48 ms, `rows.c` 18. It is used in fp32
where it was compiled and the processor has AVX2, and sums a row in the same order whatever other
rows come with it.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 32
"""With more rows, `rows.c` has more arithmetic than it can hide behind the reading."""
LIBRARIES = ("_rows512", "_rows")
"""The same files, compiled for AVX512 and for AVX2."""
KINDS = (torch.float32, torch.bfloat16, torch.int8)
"""Of a weight's numbers, by their number in lanes.h."""
_CACHE_LINE, _LARGE_PAGE = 64, 2 << 20  # bytes
_TINY = 1e-30
"""A row of no larger number is rounded to zeros (bytes.h)."""

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
def rows_library() -> Any:
    """The fastest of `LIBRARIES` for this processor; None without a compiler or AVX2."""
    return next((found for name in LIBRARIES if (found := open_library(name))), None)


def uses_rows(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether linear layers of this type are `RowsLinear` on this machine."""
    return dtype == torch.float32 and device.type == "cpu" and rows_library() is not None


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


def _allocate(size: int) -> Tensor:
    """`size` unwritten bytes, uint8, from a line of the cache on; on pages of two megabytes (Linux)
    if they fill one. What decoding reads from one end to the other at every token then needs a
    five-hundredth of the addresses looked up: SmolLM2 in fp32 takes 6 to 8% less time."""
    if size < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = torch.empty(size + _CACHE_LINE, dtype=torch.uint8)
        skipped = -room.data_ptr() % _CACHE_LINE
        return room[skipped : skipped + size]
    # from the system itself: what malloc hands out again has its pages already, and they stay
    # ordinary ones
    fresh = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # ordinary pages then, the same numbers
        fresh.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(fresh, dtype=torch.uint8)
    skipped = -room.data_ptr() % _LARGE_PAGE
    return room[skipped : skipped + size]


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for a copy of each tensor in one piece of memory, each at a line of the cache."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    whole = [-(-size // _CACHE_LINE) * _CACHE_LINE for size in sizes]  # lines
    places = _allocate(sum(whole)).split(whole)
    return [
        place[:size].view(t.dtype).view(t.shape)
        for t, size, place in zip(tensors, sizes, places, strict=True)
    ]


def copy_together(*matrices: Matrix) -> list[Matrix]:
    """The same matrices with their weights copied into one piece of memory (`together`)."""
    places = together([matrix.weight for matrix in matrices])
    pairs = zip(matrices, places, strict=True)
    return [matrix._replace(weight=at.copy_(matrix.weight)) for matrix, at in pairs]


def eight_bits(matrix: Matrix) -> bool:
    """Whether `rows.c` rounds the rows to eight bits too: int8 weights of up to 16,384 columns."""
    library = rows_library()
    if library is None or matrix.weight.dtype != torch.int8:
        return False
    return bool(library.rows_rounded(matrix.weight.shape[1]))


def rounded_rows(x: Tensor) -> Tensor:
    """Rows (…, in) rounded to ±127 steps of their largest number, as `rows.c` does."""
    most = x.abs().amax(dim=-1, keepdim=True)
    return (x * torch.where(most > _TINY, 127 / most, 0.0)).round() * (most / 127)


def few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None
) -> Tensor:
    """`F.linear(x, weight, bias)` without gradients, by `rows.c` where it applies.

    `x` in fp32 may be multiplied with a weight in bf16, or in int8 with a `scale` for each row
    (`round_weight`); sums are fp32. Where `eight_bits`, x is rounded as well, and sums are exact.
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
    given = ctypes.byref(MatrixFields(*where, KINDS.index(weight.dtype)))
    rows_library().matrix_product(given, x.data_ptr(), y.data_ptr(), rows, inputs, outputs)
    return y


def many_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` without gradients; in fp32 on a CPU by oneDNN where torch has it,
    which takes half the time of torch's own product (MKL) on AMD's processors.

    On two dimensions: oneDNN's bf16 product of a cut (1, L, D) takes 15 times as long as of (L, D).
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu" and x.dtype == weight.dtype == torch.float32 and _has_one_dnn():
        y = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    else:
        y = F.linear(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def _has_one_dnn() -> bool:
    return torch.backends.mkldnn.is_available()


class RowsLinear(nn.Module):
    """A linear layer in fp32 without gradients, through `rows.c`. A weight whose numbers are all
    bf16 is kept in bf16, with the same result to the bit; `round_to`, bf16 or int8, rounds others.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(
        self, weight: Tensor, bias: Tensor | None, round_to: torch.dtype | None = None
    ) -> None:
        super().__init__()
        kept = round_weight(weight.detach(), round_to or torch.bfloat16, bias)
        if round_to is None and not torch.equal(kept.weight.float(), weight):
            kept = Matrix(weight, bias)
        for name, tensor in zip(Matrix._fields, kept, strict=True):
            frozen = None if tensor is None else tensor.detach().contiguous()
            setattr(self, name, None if frozen is None else nn.Parameter(frozen, False))
        self.out_features, self.in_features = weight.shape

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with."""
        return Matrix(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, *self.matrix)
