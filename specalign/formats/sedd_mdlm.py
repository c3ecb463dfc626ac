"""Drafters in the layouts of SEDD, MDLM, RADD and BD3-LM on the hub, read; the layout of those
trained here, read and written.

| layout | config.json | tensors |
|---|---|---|
| SEDD, RADD | `tokens` (without the mask), `noise`, sizes under `model` | without a prefix |
| MDLM, BD3-LM | flat | under `backbone.`; BD3-LM also `sampling_eps_min`, `sampling_eps_max` |
| ours | `model_type` `ddit`: the fields of `DDiTConfig`, graph, noise and mask | without a prefix |
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specalign.common.errors import UserError, nearest
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, convert, finite, read_config
from specalign.formats.weights import check_shapes, read_folder, save_tensors
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig, Rotary

FAMILIES = ("sedd", "mdlm", "radd", "bd3lm")
OWN = "ddit"
"""The family of networks that no published layout holds."""
SCHEDULES = ("loglinear", "geometric")
_CLIPPED = ("sampling_eps_min", "sampling_eps_max")
_BACKBONE = "backbone."
_EMBEDDING = "vocab_embed.embedding"


@dataclass(frozen=True)
class ScheduleSpec:
    """A checkpoint's noise schedule: loglinear (ε = 1e-3), or geometric between two σ.
    `mask_rates`: masking probabilities of BD3-LM's clipped schedule; None = all of 0..1."""

    name: str = "loglinear"
    sigma_min: float = 1e-4
    sigma_max: float = 20.0
    mask_rates: tuple[float, float] | None = None


@dataclass(frozen=True)
class PublishedNetwork:
    """A published network, in fp32 and evaluation mode, and what its numbers mean. family: of
    `FAMILIES`, or `OWN`."""

    network: DDiT
    family: str
    schedule: ScheduleSpec
    mask_id: int

    @property
    def prediction(self) -> str:
        """`log_score` (SEDD), or `logits`: a softmax over the tokens without the mask."""
        scored = self.family == "sedd" or self.network.config.scale_by_sigma
        return "log_score" if scored else "logits"


def load_published(source: str | Path, attention_backend: str = "sdpa") -> PublishedNetwork:
    """Load a folder or hub id; `attention_backend`: as for `DDiT`. Raises UserError for missing or
    unreadable files, or tensors or a config that do not fit."""
    names = ["config.json", "model.safetensors", "pytorch_model.bin"]
    folder = model_folder(str(source), "drafter", names)
    values, tensors = read_config(folder), read_folder(folder, f"drafter {str(source)!r}")
    prefix = _BACKBONE if any(name.startswith(_BACKBONE) for name in tensors) else ""
    if prefix + _EMBEDDING not in tensors:
        known = ", ".join(FAMILIES)
        raise UserError(f"{folder}: no tensor {_EMBEDDING!r}: not a checkpoint of {known}")
    family = _find_family(values, tensors, prefix)
    config, schedule, mask_id = read_plan(values, family, f"{folder}/config.json")
    with torch.device("meta"):
        network = DDiT(config, attention_backend)
    expected = {prefix + name: tensor.shape for name, tensor in network.state_dict().items()}
    clipped = family == "bd3lm" and any(key in tensors for key in _CLIPPED)
    expected |= dict.fromkeys(_CLIPPED if clipped else (), torch.Size())
    check_shapes(tensors, expected, str(folder))
    state = {n: tensors[prefix + n].to(torch.float32, copy=True) for n in network.state_dict()}
    table = Rotary(config.head_dim).inv_freq
    # half precision rounds it by 0.4%
    if not torch.allclose(state["rotary_emb.inv_freq"], table, rtol=0.01):
        raise UserError(f"{folder}: rotary_emb.inv_freq is not that of base 10000")
    network.load_state_dict(state, assign=True)
    if clipped:
        low, high = (float(tensors[key]) for key in _CLIPPED)
        schedule = replace(schedule, mask_rates=(low, high))
    return PublishedNetwork(network.eval(), family, schedule, mask_id)


def _find_family(values: JsonObject, tensors: dict[str, Tensor], prefix: str) -> str:
    if values.get("model_type") == OWN:
        return OWN
    if prefix:
        return "bd3lm" if values.get("model_type") == "bd3lm" else "mdlm"
    return "radd" if "blocks.0.norm1.bias" in tensors else "sedd"


def save_ddit(network: DDiT, folder: Path, schedule: ScheduleSpec, mask_id: int | None) -> None:
    """Write config.json and model.safetensors in our own layout, in the network's precision."""
    save_tensors(folder / "model.safetensors", network.state_dict())
    sigmas = {"sigma_min": schedule.sigma_min, "sigma_max": schedule.sigma_max}
    noise = {"type": schedule.name, **sigmas}
    values = {"model_type": OWN, "graph": "absorbing", "noise": noise, **asdict(network.config)}
    mask = {} if mask_id is None else {"mask_token_id": mask_id}
    write_json(folder / "config.json", {**values, **mask})


# ---- config.json ----


def read_plan(values: JsonObject, family: str, where: str) -> tuple[DDiTConfig, ScheduleSpec, int]:
    """Network, schedule and mask of a config.json. Raises UserError for a key that is missing or
    does not fit."""
    config = _Values(values, where)
    schedule = ScheduleSpec() if family in ("mdlm", "bd3lm") else _read_schedule(config)
    if family == OWN:
        config.pick("graph", ("absorbing",))
        sizes = {f.name: config.get(f.name) for f in fields(DDiTConfig)}
    elif family in ("sedd", "radd"):
        sizes = _read_sedd(config, family)
    else:
        sizes = _read_mdlm(config, family)
    try:
        network = convert(sizes, DDiTConfig, "", where)
    except UserError as error:  # of its sizes, which knows no file
        raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None
    last = network.vocab_size - 1
    mask_id = values.get("mask_token_id", last)
    if type(mask_id) is not int or not 0 <= mask_id <= last:
        raise UserError(f"{where}: mask_token_id={mask_id!r:.30} is not an id within 0..{last}")
    return network, schedule, mask_id


@dataclass(frozen=True)
class _Values:
    """A config's values; errors name the file and the dotted key."""

    values: JsonObject
    where: str

    def get(self, key: str) -> Any:
        found: Any = self.values
        for part in key.split("."):
            known = found if isinstance(found, dict) else {}
            if part not in known:
                raise UserError(f"{self.where}: missing key {key!r}{nearest(part, known)}")
            found = known[part]
        return found

    def pick(self, key: str, choices: tuple[Any, ...]) -> Any:
        value = self.get(key)
        if value not in choices or type(value) is not type(choices[0]):
            raise UserError(f"{self.where}: {key}={value!r:.60}: must be one of {choices}")
        return value


def _read_schedule(config: _Values) -> ScheduleSpec:
    name = config.pick("noise.type", SCHEDULES)
    if name != "geometric":
        return ScheduleSpec(name)
    low, high = config.get("noise.sigma_min"), config.get("noise.sigma_max")
    if not (finite(low) and finite(high) and 0 < low < high):
        found = f"noise.sigma_min={low!r:.30} and sigma_max={high!r:.30}"
        raise UserError(f"{config.where}: {found}: must be numbers, 0 < min < max")
    return ScheduleSpec("geometric", float(low), float(high))


def _read_sedd(config: _Values, family: str) -> JsonObject:
    tokens = config.get("tokens")
    if type(tokens) is not int:
        raise UserError(f"{config.where}: tokens must be a whole number, not {tokens!r:.60}")
    scaled = False
    if family == "sedd":
        config.pick("graph.type", ("absorb",))  # uniform noise leaves no mask to draft from
        scaled = config.pick("model.scale_by_sigma", (True, False))
    return {
        "vocab_size": tokens + 1,
        "hidden_size": config.get("model.hidden_size"),
        "time_input": "sigma" if family == "sedd" else "none",
        "norm_bias": family == "radd",
        "scale_by_sigma": scaled,
        **_read_sizes(config, "model.", "full"),
    }


def _read_mdlm(config: _Values, family: str) -> JsonObject:
    values = config.values
    if values.get("causal") is True or values.get("causal_attention") is True:
        raise UserError(f"{config.where}: causal is on: an autoregressive model, not a diffusion")
    scored = False
    if "parameterization" in values:
        scored = config.pick("parameterization", ("subs", "sedd")) == "sedd"
    time_input = "sigma" if config.pick("time_conditioning", (True, False)) else "zero"
    attention = "full"
    if family == "bd3lm":
        attention = "full" if values.get("cross_attn") is False else "block_causal"
        time_input = "none" if values.get("adaln") is False else time_input
    return {
        "vocab_size": config.get("vocab_size"),
        "hidden_size": config.get("hidden_dim"),
        "time_input": time_input,
        "scale_by_sigma": scored,
        **_read_sizes(config, "", attention),
    }


def _read_sizes(config: _Values, section: str, attention: str) -> JsonObject:
    """What all four families call by one name; the key `attention` is ours."""
    attention = config.values.get("attention", attention)
    sizes = {name: config.get(section + name) for name in ("n_blocks", "n_heads", "cond_dim")}
    options = config.values["model"] if section else config.values
    sizes["dropout"] = options.get("dropout", DDiTConfig.dropout)
    block_size = config.get("block_size") if attention == "block_causal" else 0
    return {**sizes, "attention": attention, "block_size": block_size}
