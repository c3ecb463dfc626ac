"""Linear layers for small inputs on a CPU: weights packed once into oneDNN's own layout.

A step that verifies a draft multiplies 2 to 32 rows; torch's default product for that shape re-reads the weight in a
poor order (two AVX2 cores, 1536×576, 8 rows: 55 ms for 106M parameters against 40 ms packed; 33 against 30 for one).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def packing_works(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch offers the packed product for the dtype on this device, tried on a small example."""
    if (
        device.type != "cpu"
        or dtype not in (torch.float32, torch.bfloat16)
        or not torch.backends.mkldnn.is_available()
    ):
        return False
    try:
        weight = torch.linspace(-1, 1, 64 * 32, dtype=torch.float32).reshape(64, 32).to(dtype)
        rows = torch.linspace(-1, 1, 3 * 32, dtype=torch.float32).reshape(3, 32).to(dtype)
        got = PackedLinear(weight, None)(rows)
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
    return torch.allclose(
        got.float(), F.linear(rows, weight).float(), atol=1e-5 if dtype == torch.float32 else 0.2
    )


class PackedLinear(nn.Module):
    """`F.linear(x, weight, bias)` without gradients, (…, in) → (…, out), from a packed copy of the weight.

    `weight` (out, in) stays reachable, unpacked, under the name that `nn.Linear` gives it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = 8) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), rows)

    def forward(self, x: Tensor) -> Tensor:
        if (
            x.numel() == self.in_features
        ):  # one row is a matter of memory alone: torch's own product is as fast
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def pack_linears(module: nn.Module) -> int:
    """Replace every `nn.Linear` below `module` by its packed form; returns how many."""
    count = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
            count += 1
        else:
            count += pack_linears(child)
    return count
