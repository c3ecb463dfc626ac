"""A target's device and dtype: as asked for, or the fastest on this machine."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from specalign.common.errors import UserError, nearest
from specalign.common.provenance import memory_bytes
from specalign.common.schema import SHORT_DTYPES
from specalign.common.text import cut
from specalign.kernels.linear import is_linear, rows_library
from specalign.lm.names import check_dtype
from specalign.lm.opening import empty_model

SMALL = 300_000_000
"""Parameters up to which fp32 decodes faster: torch's bf16 operators start more slowly."""
_MOSTLY = 0.75
"""The share of numbers in linear layers and embeddings below which fp32 reads too much."""


def find_device(name: str) -> torch.device:
    """A device by its name; `auto`: the GPU, if any. Raises UserError for a missing one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        hint = nearest(name, ["auto", "cpu", "cuda"])
        raise UserError(f"device {name!r} is unknown{hint}") from None
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).strip().splitlines() or ["no such device"])[0]
        raise UserError(f"device {name!r} can't be used: {cut(why, 120)}") from None
    return device


def target_dtype(name: str, device: torch.device) -> torch.dtype:
    """A type by its name, else UserError; `auto`: bf16 where hardware has it, else fp32."""
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    check_dtype(name)
    return getattr(torch, SHORT_DTYPES.get(name, name))


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products run on hardware; else they take 10 times as long as fp32 on a CPU."""
    if device.type != "cpu":
        return device.type == "cuda" and torch.cuda.is_bf16_supported()
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "amx_bf16" in flags or "avx512_bf16" in flags


def decodes_faster_in_fp32(
    folder: Path | str, spec: str, options: Mapping[str, object], device: torch.device
) -> bool:
    """Whether few rows at a time are faster in fp32 on a CPU with bf16 products. With
    `specalign.kernels` they are where the model is small, or the checkpoint is bf16 and most of it
    lies in linear layers, whose weights stay bf16 in memory."""
    if device.type != "cpu" or rows_library() is None:
        return False
    try:
        model = empty_model(folder, spec, options)
    except UserError:
        raise
    except Exception:  # models that need real memory fail in many ways
        return False
    config = model.config
    parameters = sum(p.numel() for p in model.parameters())
    kinds = [m for m in model.modules() if is_linear(m) or isinstance(m, nn.Embedding)]
    weights = {p for m in kinds for p in m.parameters(recurse=False) if p.dim() == 2}
    in_layers = sum(p.numel() for p in weights)
    if getattr(config, "quantization_config", None) is not None:
        return False
    if parameters <= SMALL:
        return True
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or config.dtype
    is_half = str(stored).removeprefix("torch.") == "bfloat16"
    memory = memory_bytes()  # it is loaded in fp32, whose weights become bf16 one by one
    fits = memory is not None and 4 * parameters < memory / 2
    return is_half and in_layers > _MOSTLY * parameters and fits
