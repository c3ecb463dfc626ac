"""What a recipe is planned for: named accelerators, with the peaks that their makers state, or this machine's processor, measured."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from align.common.errors import UserError, nearest
from align.common.provenance import machine, memory_bytes

STATED = Path(__file__).with_name("hardware.json")


@dataclass(frozen=True)
class Hardware:
    """flops: of products, a second and device; bandwidth: bytes of memory a second; memory: bytes of a device. count: devices. stated:
    whether the figures are a maker's, of which a share is reached."""

    name: str
    title: str
    flops: float
    bandwidth: float
    memory: float
    count: int = 1
    gpu: bool = True
    source: str = ""

    @property
    def stated(self) -> bool:
        return bool(self.source)


def named_hardware(word: str) -> Hardware:
    """`NAME` or `NAMExCOUNT` of hardware.json.

    Raises:
        UserError: an unknown name.
    """
    known = json.loads(STATED.read_text(encoding="utf-8"))
    name, count = word.lower(), "1"
    if name not in known and (found := re.fullmatch(r"(.+)x([1-9]\d{0,4})", name)):
        name, count = found[1], found[2]
    if name not in known:
        near = nearest(name, known)
        raise UserError(
            f"--hardware {word}: unknown{near}; NAMExCOUNT for several, or --memory-gb, --tflops and --bandwidth-gbs"
        )
    entry = known[name]
    return Hardware(
        name=word,
        title=entry["title"],
        flops=entry["tflops"] * 1e12,
        bandwidth=entry["bandwidth_gbs"] * 1e9,
        memory=entry["memory_gb"] * 1e9,
        count=int(count),
        source=entry["source"],
    )


def with_stated(
    base: Hardware, memory_gb: float | None, tflops: float | None, bandwidth_gbs: float | None
) -> Hardware:
    """`base` with figures that were given instead."""
    return replace(
        base,
        memory=base.memory if memory_gb is None else memory_gb * 1e9,
        flops=base.flops if tflops is None else tflops * 1e12,
        bandwidth=base.bandwidth if bandwidth_gbs is None else bandwidth_gbs * 1e9,
    )


def this_processor() -> Hardware:
    """This machine's CPU: what products and copies reach here now, in a second of trying."""
    import torch

    about = machine()
    a, b = torch.randn(768, 768), torch.randn(768, 768)
    big = torch.zeros(1 << 24)
    _ = a @ b
    seconds, copies = [], []
    for _ in range(5):
        start = time.perf_counter()
        _ = a @ b
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        big.sum()
        copies.append(time.perf_counter() - start)
    return Hardware(
        name="here",
        title=f"this machine ({about['processor']}, {torch.get_num_threads()} threads)",
        flops=2 * 768**3 / min(seconds),
        bandwidth=big.numel() * 4 / min(copies),
        memory=float(memory_bytes() or 0),
        gpu=False,
    )
