"""Drafters in the layouts of SEDD and MDLM on the hub, read; the layout of those trained here, read and
written.

| layout | config.json | tensors |
|---|---|---|
| SEDD | `tokens` (without the mask), `noise`, sizes under `model` | without a prefix |
| MDLM | flat | under `backbone.` |
| ours | `model_type` `ddit`: the fields of `DDiTConfig`, graph, noise and mask | without a prefix |
"""

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, finite, read_config
from specalign.diffusion.schedules import SCHEDULES
from specalign.formats.weights import check_shapes, read_folder, save_tensors
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig, Rotary

OWN = "ddit"
"""The model type of networks that no published layout holds."""
_SIGMAS = {"sigma_min": 1e-4, "sigma_max": 20.0}
_BACKBONE = "backbone."
_EMBEDDING = "vocab_embed.embedding"


def load_published(source: str | Path, attention_backend: str = "sdpa") -> tuple[DDiT, JsonObject]:
    """The network of a folder or hub id, in fp32 and evaluation mode, and what its numbers mean
    (`read_plan`); `attention_backend`: as for `DDiT`. Raises UserError for missing or unreadable
    files, or tensors or a config that do not fit."""
    names = ["config.json", "model.safetensors", "pytorch_model.bin"]
    folder = model_folder(str(source), "drafter", names)
    values, tensors = read_config(folder), read_folder(folder, f"drafter {str(source)!r}")
    prefix = _BACKBONE if any(name.startswith(_BACKBONE) for name in tensors) else ""
    if prefix + _EMBEDDING not in tensors:
        why = f"no tensor {_EMBEDDING!r}: not a checkpoint of these families: sedd, mdlm"
        raise UserError(f"{folder}: {why}")
    config, process = read_plan(values, f"{folder}/config.json")
    with torch.device("meta"):
        network = DDiT(config, attention_backend)
    expected = {prefix + name: tensor.shape for name, tensor in network.state_dict().items()}
    check_shapes(tensors, expected, str(folder))
    state = {n: tensors[prefix + n].to(torch.float32, copy=True) for n in network.state_dict()}
    table = Rotary(config.head_dim).inv_freq
    # half precision rounds it by 0.4%
    if not torch.allclose(state["rotary_emb.inv_freq"], table, rtol=0.01):
        raise UserError(f"{folder}: rotary_emb.inv_freq does not use base 10000")
    network.load_state_dict(state, assign=True)
    return network.eval(), process


def save_ddit(network: DDiT, folder: Path, schedule: JsonObject, mask_id: int | None) -> None:
    """Write config.json and model.safetensors in our own layout, in the network's precision."""
    save_tensors(folder / "model.safetensors", network.state_dict())
    sigmas = {name: schedule.get(name, default) for name, default in _SIGMAS.items()}
    noise = {"type": schedule["name"], **sigmas}
    values = {"model_type": OWN, "graph": "absorbing", "noise": noise, **asdict(network.config)}
    mask = {} if mask_id is None else {"mask_token_id": mask_id}
    write_json(folder / "config.json", {**values, **mask})


# ---- config.json ----


def read_plan(values: JsonObject, where: str) -> tuple[DDiTConfig, JsonObject]:
    """The network of a config.json, and fields of `DiffusionConfig`: schedule, mask_id and
    prediction: `log_score` (SEDD), or `logits`: a softmax over the tokens without the mask. Raises
    UserError for a key that is missing or does not fit."""
    with in_one_line(where):
        read = {OWN: _read_own, "mdlm": _read_mdlm}.get(str(values.get("model_type")), _read_sedd)
        network = DDiTConfig(**read(values))
        schedule = {"name": "loglinear"} if read is _read_mdlm else _read_schedule(values)
        last = network.vocab_size - 1
        mask_id = values.get("mask_token_id", last)
        if type(mask_id) is not int or not 0 <= mask_id <= last:
            raise UserError(f"mask_token_id={mask_id!r:.30} is not an id within 0..{last}")
    scores = read is _read_sedd or network.scale_by_sigma
    prediction = "log_score" if scores else "logits"
    return network, {"schedule": schedule, "mask_id": mask_id, "prediction": prediction}


def _find(values: JsonObject, key: str, *choices: Any) -> Any:
    """The value of a dotted key, one of the `choices` where there are any. Raises UserError."""
    value: Any = values
    for part in key.split("."):
        known = value if isinstance(value, dict) else {}
        if part not in known:
            raise UserError(f"missing key {key!r}{nearest(part, known)}")
        value = known[part]
    if choices and (value not in choices or type(value) is not type(choices[0])):
        raise UserError(f"{key}={value!r:.60}: must be one of {choices}")
    return value


def _read_schedule(values: JsonObject) -> JsonObject:
    name = _find(values, "noise.type", *SCHEDULES)
    if name != "geometric":
        return {"name": name}
    low, high = _find(values, "noise.sigma_min"), _find(values, "noise.sigma_max")
    if not (finite(low) and finite(high) and 0 < low < high):
        found = f"noise.sigma_min={low!r:.30} and sigma_max={high!r:.30}"
        raise UserError(f"{found}: must be numbers, 0 < min < max")
    return {"name": name, "sigma_min": float(low), "sigma_max": float(high)}


def _read_own(values: JsonObject) -> JsonObject:
    _find(values, "graph", "absorbing")
    return {f.name: _find(values, f.name) for f in fields(DDiTConfig)}


def _read_sedd(values: JsonObject) -> JsonObject:
    tokens = _find(values, "tokens")
    if type(tokens) is not int:
        raise UserError(f"tokens must be a whole number, not {tokens!r:.60}")
    _find(values, "graph.type", "absorb")  # uniform noise leaves no mask to draft from
    names = ("hidden_size", "n_blocks", "n_heads", "cond_dim")
    sizes = {name: _find(values, f"model.{name}") for name in names}
    dropout = values["model"].get("dropout", DDiTConfig.dropout)
    scaled = _find(values, "model.scale_by_sigma", True, False)
    return {**sizes, "vocab_size": tokens + 1, "dropout": dropout, "scale_by_sigma": scaled}


def _read_mdlm(values: JsonObject) -> JsonObject:
    if values.get("causal") is True or values.get("causal_attention") is True:
        raise UserError("causal=true: autoregressive, not a diffusion model")
    names = ("vocab_size", "n_blocks", "n_heads", "cond_dim")
    found = {name: _find(values, name) for name in names}
    found["hidden_size"] = _find(values, "hidden_dim")
    found["dropout"] = values.get("dropout", DDiTConfig.dropout)
    found["time_input"] = "sigma" if _find(values, "time_conditioning", True, False) else "zero"
    if "parameterization" in values:
        found["scale_by_sigma"] = _find(values, "parameterization", "subs", "sedd") == "sedd"
    return found
