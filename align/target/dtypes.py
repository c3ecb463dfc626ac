"""The type of a target's numbers: as asked for, or what is fastest on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from align.common.provenance import memory_bytes
from align.common.schema import SHORT_DTYPES
from align.kernels.linear import is_linear, rows_library
from align.target.names import check_dtype

SMALL = 300_000_000
"""Parameters up to which fp32 decodes faster than bf16 although twice as much is read: torch's bf16 operators take longer to begin."""


def target_dtype(name: str, device: torch.device) -> torch.dtype:
    """A type by its name; `auto`: bf16 where its products run on hardware, else fp32.

    Raises:
        UserError: there is no such type.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    check_dtype(name)
    return getattr(torch, SHORT_DTYPES.get(name, name))


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products run on hardware: without AMX or AVX512-bf16 they take 10 times as long as fp32 on a CPU."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


_MOSTLY = 0.75
"""Of a model's numbers in linear layers and embeddings: with fewer, fp32 reads too much."""


def decodes_faster_in_fp32(config: Any, empty: Callable[[], Any], device: torch.device) -> bool:
    """Whether few rows at a time go faster in fp32 on a CPU that has bf16 products. With `align.kernels` they do where the checkpoint
    is bf16 (weights of linear layers stay so in memory, and as much is read; those of experts do not) or the model small. SmolLM2, two
    Zen 5 cores, a call of 1 / 5 / 9 rows: 6.4 / 8.2 / 11.3 ms in fp32 out of a bf16 checkpoint, 15.1 / 18.5 / 20.1 in bf16, 9.1 / 12.0 / 14.2 out of an fp32 one.

    Args:
        config: the model's, of transformers. empty: makes it, here on `meta`, where weights take no room.
    """
    if device.type != "cpu" or rows_library() is None or getattr(config, "quantization_config", None):
        return False
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    half = str(stored).removeprefix("torch.") == "bfloat16"
    try:
        with torch.device("meta"):
            model = empty()
        parameters = sum(p.numel() for p in model.parameters())
        layers = {
            m.weight: m.weight.numel() for m in model.modules() if is_linear(m) or isinstance(m, nn.Embedding)
        }
    except Exception:  # a model that can't be made without memory has no common class of errors
        return False
    room = memory_bytes()  # it is loaded in fp32, whose weights become bf16 one by one
    half = half and sum(layers.values()) > _MOSTLY * parameters
    return parameters <= SMALL or (half and room is not None and 4 * parameters < room / 2)
