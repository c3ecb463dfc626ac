"""What nothing on this device is faster than: launches, syncs, uploads, bandwidth, products of few
rows, attention.

    python -m tools.gpu.floor --out floor.json                        # a GPU
    python -m tools.gpu.floor --device cpu --shape debug
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from decode.captured.graph import CudaGraph
from specalign.common.schema import JsonObject
from specalign.common.text import markdown_table, say, say_once
from specalign.lm.attention import grouped_attention, visible_mask
from tools.gpu.common import (
    SHAPES,
    ModelSize,
    dtype_on,
    kernel_us,
    make_parser,
    save_report,
    time_us,
)

ROWS = (1, 2, 4, 6, 8, 16, 32, 64, 128, 192)
QUERIES = (1, 6, 32)
KEYS = (1024, 4096, 16384)
FLEX_QUERIES = 6
"""The rows of a round; a compiler takes seconds for each number of keys, and the least is left out."""
CHAIN = 200
"""Launches in a row."""
BEYOND_CACHE = 256 << 20
"""Bytes of weights, so that none of them stay in a GPU's cache from call to call."""


def measure_host(device: torch.device) -> JsonObject:
    """Microseconds of a launch, a sync and an upload."""
    x = torch.zeros(64, device=device)

    def add() -> None:
        for _ in range(CHAIN):
            x.add_(1)

    launches = {"eager": time_us(add, device) / CHAIN}
    host = torch.zeros(64, dtype=torch.int64)
    uploads = {"pageable": time_us(lambda: host.to(device, copy=True), device)}
    if device.type == "cuda":
        launches["graph"] = time_us(CudaGraph(add).replay, device) / CHAIN
        pinned = host.pin_memory()
        uploads["pinned"] = time_us(lambda: pinned.to(device, non_blocking=True), device)
    return {"launch_us": launches, "sync_us": time_us(x[0].item, device), "upload_us": uploads}


def measure_bandwidth(device: torch.device, small: bool) -> JsonObject:
    """GB/s of a copy, read and written bytes together, and of reading a matrix for one row."""
    width = 1024 if small else 8192
    matrix = torch.ones(width, 8 * width, device=device, dtype=dtype_on(device))
    row, copy, size = matrix[:1], torch.empty_like(matrix), matrix.nbytes
    found = {
        "copy": 2 * size / kernel_us([lambda: copy.copy_(matrix)], device),
        "read": size / kernel_us([lambda: F.linear(row, matrix)], device),
    }
    return {name: value / 1e3 for name, value in found.items()}


def measure_products(size: ModelSize, device: torch.device, small: bool) -> JsonObject:
    """Microseconds of all products of a layer, by rows, and GB/s of weights read."""
    dtype = dtype_on(device)
    layer = sum(a * b for a, b in size.products) * dtype.itemsize
    layers = [
        [torch.randn(a, b, device=device, dtype=dtype) for a, b in size.products]
        for _ in range(1 if small else max(1, BEYOND_CACHE // layer))
    ]
    found: JsonObject = {}
    for rows in ROWS:
        widths = {b for _, b in size.products}
        inputs = {b: torch.randn(rows, b, device=device, dtype=dtype) for b in widths}

        def run(matrices: list[Tensor], inputs: dict[int, Tensor] = inputs) -> None:
            for matrix in matrices:
                F.linear(inputs[matrix.shape[1]], matrix)

        us = kernel_us([partial(run, matrices) for matrices in layers], device)
        found[str(rows)] = {"us": us, "gb_s": layer / us / 1e3}
    return found


def measure_attention(size: ModelSize, device: torch.device, small: bool) -> JsonObject:
    """Microseconds of a layer's attention by query rows and keys: `plain` without a mask, `mask` with
    a bool one, `flex` by flex_attention for a round's rows, null if it does not run."""
    dtype = dtype_on(device)
    found: JsonObject = {}
    sizes = [n // 32 for n in KEYS] if small else KEYS
    for keys in sizes:
        shape, bytes_of = (2, 1, size.kv_heads, keys, size.head_dim), 2 * dtype.itemsize
        count = BEYOND_CACHE // (keys * size.kv_heads * size.head_dim * bytes_of)
        pairs = [
            torch.randn(shape, device=device, dtype=dtype)
            for _ in range(1 if small else min(max(1, count), 256))
        ]
        for rows in QUERIES:
            q = torch.randn(1, size.heads, rows, size.head_dim, device=device, dtype=dtype)
            mask = visible_mask(None, rows, keys - rows, device)[None, None]
            scale = q.shape[-1] ** -0.5
            plain = [partial(grouped_attention, q, k, v, None, scale) for k, v in pairs]
            masked = [partial(grouped_attention, q, k, v, mask, scale) for k, v in pairs]
            us = {"plain": kernel_us(plain, device), "mask": kernel_us(masked, device)}
            if rows == FLEX_QUERIES and keys > sizes[0]:
                us |= {"flex": _time_flex(q, pairs)}
            found[f"{rows} x {keys}"] = us
    return found


def _time_flex(q: Tensor, pairs: list[Tensor]) -> float | None:
    device, rows, keys = q.device, q.shape[2], pairs[0].shape[3]

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (keys - rows)

    torch.compiler.reset()  # one size after the other would be compiled for all sizes
    flex = flex_attention if device.type == "cpu" else torch.compile(flex_attention)
    try:
        mask = create_block_mask(sees, None, None, rows, keys, device=device)
        calls = [partial(flex, q, k, v, block_mask=mask, enable_gqa=True) for k, v in pairs]
        return kernel_us(calls, device)
    except Exception as error:  # of Dynamo, Inductor, Triton or the compiler that it calls
        say_once(f"note: flex_attention does not run here: {error}")
        return None


def main(argv: list[str] | None = None) -> None:
    given = make_parser("tools.gpu.floor", __doc__ or "", "135m,1b,8b").parse_args(argv)
    device, small = given.device, given.shape == ["debug"]
    figures: JsonObject = {
        **measure_host(device),
        "bandwidth_gb_s": measure_bandwidth(device, small),
        "products": {n: measure_products(SHAPES[n], device, small) for n in given.shape},
        "attention_us": {n: measure_attention(SHAPES[n], device, small) for n in given.shape},
    }
    print_figures(figures)
    save_report(given.out, device, figures)


def print_figures(figures: JsonObject) -> None:
    for name, value in figures.items():
        if name not in ("products", "attention_us"):
            parts = value if isinstance(value, dict) else {"": value}
            say(f"{name}: " + ", ".join(f"{kind} {x:.1f}".strip() for kind, x in parts.items()))
    for name, by_rows in figures["products"].items():
        cells = [[str(r), f"{x['us']:.1f}", f"{x['gb_s']:.0f}"] for r, x in by_rows.items()]
        say(markdown_table([f"{name}: rows", "µs a layer", "GB/s of weights"], cells))
    for name, by_sizes in figures["attention_us"].items():
        kinds = ("plain", "mask", "flex")
        cells = [
            [sizes, *(f"{us[kind]:.1f}" if us.get(kind) else "–" for kind in kinds)]
            for sizes, us in by_sizes.items()
        ]
        say(markdown_table([f"{name}: queries x keys", *(f"{kind}, µs" for kind in kinds)], cells))


if __name__ == "__main__":
    main()
