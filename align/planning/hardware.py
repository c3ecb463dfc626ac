"""What a recipe is planned for: this machine, or accelerators by name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from align.config.hardware import accelerator, check_devices, check_packages, gpu_count
from align.config.recipe import Recipe
from specalign.common.errors import UserError, nearest
from specalign.common.provenance import machine, memory_bytes

GB = 1e9
KNOWN = {
    "h100": ("NVIDIA H100 SXM", 80 * GB),
    "h200": ("NVIDIA H200 SXM", 141 * GB),
    "a100": ("NVIDIA A100 SXM 80 GB", 80 * GB),
    "a100-40": ("NVIDIA A100 SXM 40 GB", 40 * GB),
    "l40s": ("NVIDIA L40S", 48 * GB),
    "rtx4090": ("NVIDIA GeForce RTX 4090", 24 * GB),
}
"""Title and memory of a device, from NVIDIA's data sheets."""


@dataclass(frozen=True)
class Hardware:
    """memory: bytes of a device (0 = unknown); count: devices."""

    title: str
    memory: float
    count: int = 1
    gpu: bool = True


def find_hardware(name: str) -> Hardware:
    """`NAME` or `NAMExCOUNT`. Raises UserError for an unknown name."""
    known = name.lower()
    count = re.search(r"x([1-9]\d{0,4})$", known)
    if known not in KNOWN and count:
        known = known[: count.start()]
    if known not in KNOWN:
        raise UserError(
            f"--hardware {name}: unknown{nearest(known, KNOWN)}; NAMExCOUNT for several, or "
            "--memory-gb"
        )
    title, memory = KNOWN[known]
    return Hardware(title, memory, int(count[1]) if count and known != name.lower() else 1)


def find_local_hardware(recipe: Recipe) -> Hardware:
    """What the recipe runs on here: the machine's GPUs or its processor."""
    check_packages(recipe)
    check_devices(recipe)
    if accelerator(recipe) == "cpu":
        return Hardware(
            f"this machine ({machine()['processor']})", float(memory_bytes() or 0), gpu=False
        )
    import torch

    device = torch.cuda.get_device_properties(0)
    return Hardware(f"this machine's {device.name}", float(device.total_memory), gpu_count())
