"""Checkpoints of the published layouts (SEDD, MDLM) of a small network, as their authors write them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "cond_dim": 6,
    "n_blocks": 2,
    "n_heads": 2,
    "dropout": 0.1,
}
SEDD: dict[str, Any] = {
    "ngpus": 8,
    "tokens": 10,
    "graph": {"type": "absorb", "file": "data"},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {"name": "small", "type": "ddit", "length": 32, "scale_by_sigma": True, **SIZES},
}
FLAT: dict[str, Any] = {**{k: v for k, v in SIZES.items() if k != "hidden_size"}, "hidden_dim": 16}
MDLM: dict[str, Any] = {"model_type": "mdlm", "vocab_size": 11, "time_conditioning": False, **FLAT}


def network(**changes: Any) -> DDiT:
    generator = torch.Generator().manual_seed(0)
    net = DDiT(DDiTConfig(**{"vocab_size": 11, **SIZES, **changes}))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return net.eval()


def state(net: DDiT, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: tensor.detach().clone() for name, tensor in net.state_dict().items()}


def write_hub(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], pickled: bool = False
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, str(folder / "model.safetensors"))
    return folder
