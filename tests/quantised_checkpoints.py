"""Tiny checkpoints in the formats of quantised ones that a CPU can open, written as their makers write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specalign.lm.debug import debug_model
from tests.target_models import tiny_model

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of four bits of MXFP4 (E2M1)."""


def save_quantised(method: str, folder: Path, kind: str = "llama") -> dict[str, Tensor]:
    """A tiny model in that format; the numbers that its quantised weights stand for, by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_model("gpt_oss" if method == "mxfp4" else kind, 260)
    model.save_pretrained(folder)
    debug_model("Llama")[1].save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors, meant = load_file(str(path)), {}
    write = {"fp8": _fp8, "mxfp4": _mxfp4}[method]
    for name in [name for name in tensors if _quantises(method, name)]:
        meant[name] = write(tensors, name)
    save_file(tensors, str(path), metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    block: dict[str, Any] = {"weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    own = block if method == "fp8" else {"modules_to_not_convert": ["lm_head"]}
    config["quantization_config"] = {"quant_method": method, **own}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


def _quantises(method: str, name: str) -> bool:
    if method == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return "_proj.weight" in name


def _fp8(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Blocks of 32 × 32 with a scale each."""
    weight = tensors[name]
    rows, columns = weight.shape
    blocks = weight.view(rows // 32, 32, columns // 32, 32)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448.0
    small = (blocks / scale).to(torch.float8_e4m3fn)
    tensors[name] = small.reshape(rows, columns)
    tensors[f"{name}_scale_inv"] = scale[:, 0, :, 0].contiguous()
    return (small.float() * scale).reshape(rows, columns)


def _mxfp4(tensors: dict[str, Tensor], name: str) -> Tensor:
    """32 numbers of four bits with a power of two, along the input."""
    weight = tensors.pop(name).transpose(1, 2)  # (experts, out, in)
    experts, rows, columns = weight.shape
    blocks = weight.reshape(experts, rows, columns // 32, 32)
    power = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True) / 4.0))
    values = torch.tensor(FP4)
    index = ((blocks / 2.0**power)[..., None] - values).abs().argmin(-1)
    packed = index[..., 0::2] | (index[..., 1::2] << 4)
    tensors[f"{name}_blocks"] = packed.to(torch.uint8)
    tensors[f"{name}_scales"] = (power[..., 0] + 127).to(torch.uint8)
    return (values[index] * 2.0**power).reshape(experts, rows, columns).transpose(1, 2)
