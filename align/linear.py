"""Linear layers for few rows on a CPU: a step that decodes one token, or verifies a short draft, reads all weights to
multiply 1 to 16 rows with them.

torch's default product is made for many rows. Two AVX2 cores, SmolLM2-135M's 106M parameters in layers, idle:

    rows                      1     2     5     9    16
    torch's default, ms      29    46    48    66    66
    oneDNN, packed, ms       21    22    25    33    40
    rows.c, ms               19    18    18    22    36

In fp32 `rows.c` is used where the installation could compile it and the processor has AVX2; else oneDNN's packed form,
and that in bf16. `rows.c` adds up a row in the same order whatever rows come with it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MOST_ROWS = 16
"""With more rows, `rows.c` has more arithmetic than it can hide behind the reading."""


@cache
def rows_library() -> Any:
    """`rows.c` as a library; None where it was not compiled or the processor lacks AVX2."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_rows{suffix}")
        if path.is_file():
            try:
                library = ctypes.CDLL(str(path))  # torch is loaded: they share one OpenMP
                library.rows_product.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3
                library.rows_product.restype = None
                return library if library.rows_available() else None
            except (OSError, AttributeError):
                return None
    return None


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` without gradients, (…, in) → (…, out); through `rows.c` where that fits."""
    rows = x.numel() // weight.shape[1]
    fits = 0 < rows <= MOST_ROWS and weight.is_contiguous() and weight.device.type == "cpu"
    if not fits or not x.dtype == weight.dtype == torch.float32 or rows_library() is None:
        return F.linear(x, weight, bias)
    x = x.contiguous()
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    where = None if bias is None else bias.data_ptr()
    rows_library().rows_product(
        x.data_ptr(), weight.data_ptr(), where, y.data_ptr(), rows, weight.shape[1], weight.shape[0]
    )
    return y


class RowsLinear(nn.Module):
    """`F.linear(x, weight, bias)` without gradients, fp32, (…, in) → (…, out), through `rows.c`."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().contiguous(), requires_grad=False)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, self.weight, self.bias)


class PackedLinear(nn.Module):
    """`F.linear(x, weight, bias)` without gradients, (…, in) → (…, out), from a copy of the weight in oneDNN's layout.

    `weight` (out, in) stays reachable, unpacked, under the name that `nn.Linear` gives it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)

    def forward(self, x: Tensor) -> Tensor:
        if x.numel() == self.in_features:  # one row: waiting threads asleep, packed was 12% slower
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def fast_linear(dtype: torch.dtype, device: torch.device) -> type[RowsLinear] | type[PackedLinear] | None:
    """The layer that is fastest for few rows here, tried on a small example; None = torch's own."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return None
    if dtype == torch.float32 and rows_library() is not None and _right(RowsLinear, dtype):
        return RowsLinear
    return PackedLinear if torch.backends.mkldnn.is_available() and _right(PackedLinear, dtype) else None


def _right(kind: type[RowsLinear] | type[PackedLinear], dtype: torch.dtype) -> bool:
    try:
        weight = torch.linspace(-1, 1, 64 * 32, dtype=torch.float32).reshape(64, 32).to(dtype)
        rows = torch.linspace(-1, 1, 3 * 32, dtype=torch.float32).reshape(3, 32).to(dtype)
        got = kind(weight, None)(rows)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return torch.allclose(
        got.float(), F.linear(rows, weight).float(), atol=1e-5 if dtype == torch.float32 else 0.2
    )


def speed_up_linears(module: nn.Module, dtype: torch.dtype, device: torch.device) -> int:
    """Replace every `nn.Linear` below `module` by the form that is fastest for few rows; returns how many."""
    kind = fast_linear(dtype, device)
    return 0 if kind is None else _replace(module, kind)


def _replace(module: nn.Module, kind: type[RowsLinear] | type[PackedLinear]) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, kind(child.weight, child.bias))
            count += 1
        else:
            count += _replace(child, kind)
    return count
