"""Checkpoints of the published layouts (SEDD, RADD, MDLM, BD3-LM) of a small network, as their authors write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.formats.published import load_published
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
BD3LM: dict[str, Any] = {
    **MDLM,
    "model_type": "bd3lm",
    "block_size": 4,
    "cross_attn": True,
    "var_min": True,
}
RADD: dict[str, Any] = {
    "tokens": 10,
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {"type": "ddit_wot", "use_checkpoint": False, "dtype": "float16", **SIZES},
}
MDLM_RUN: dict[str, Any] = {  # .hydra/config.yaml of the original code
    "backbone": "dit",
    "parameterization": "subs",
    "time_conditioning": False,
    "T": 0,
    "data": {"train": "openwebtext", "tokenizer_name_or_path": "gpt2"},
    "noise": {"type": "loglinear", "sigma_min": 1e-4, "sigma_max": 20},
    "model": {"length": 32, "scale_by_sigma": True, "tie_word_embeddings": False, **SIZES},
}
BD3LM_RUN: dict[str, Any] = {
    **{
        k: v
        for k, v in MDLM_RUN.items()
        if k not in ("parameterization", "time_conditioning", "backbone")
    },
    "block_size": 4,
    "algo": {
        "name": "bd3lm",
        "parameterization": "subs",
        "time_conditioning": False,
        "cross_attn": True,
    },
}


def network(seed: int = 0, **changes: Any) -> DDiT:
    generator = torch.Generator().manual_seed(seed)
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


def write_run(folder: Path, config: dict[str, Any], name: str, content: dict[str, Any]) -> Path:
    """A training run's folder as hydra leaves it."""
    for part in (".hydra", Path(name).parent):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / ".hydra" / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    torch.save(content, folder / name)
    return folder


def averaged(net: DDiT) -> dict[str, Any]:
    return {
        "decay": 0.9999,
        "num_updates": 7,
        "shadow_params": [p.detach().clone() for p in net.parameters()],
    }


def assert_same(net: DDiT, expected: DDiT) -> None:
    mine, theirs = net.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, theirs[name]), name
    assert net.config == expected.config
    assert not net.training


def refuses(source: Path | str, says: str) -> str:
    with pytest.raises(UserError, match=says) as caught:
        load_published(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)
