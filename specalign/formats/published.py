"""Published checkpoints of SEDD, MDLM, RADD and BD3-LM: hub folders and original training files,
recognised by content.

| what | content |
|---|---|
| SEDD, RADD on the hub | config.json with `tokens`, `noise`, `model`; tensors without a prefix |
| MDLM, BD3-LM on the hub | flat config.json; tensors under `backbone.`; BD3-LM also `sampling_eps_min`, `sampling_eps_max` |
| SEDD, RADD in training | `model`, `ema`, the config in `.hydra/config.yaml` |
| MDLM, BD3-LM in training (Lightning) | `state_dict`, `ema`, the config in `.hydra/config.yaml` or plain hyperparameters |

`ema.shadow_params` is an unnamed list in the order of the parameters, without buffers; it holds the
weights to use. Only tensors are read: no code of a checkpoint runs. `save_published` adds the keys
`attention` and `block_size` to config.json if a drafter's attention is not the published one. A
network that none of the four layouts can hold gets our own config.json, `model_type` `ddit`: the
fields of `DDiTConfig`, graph, noise and mask.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.files import (
    ForeignObject,
    load_safetensors,
    load_tensors,
    read_text,
    write_atomically,
    write_json,
)
from specalign.common.hub import local_path, model_folder
from specalign.common.schema import read_config
from specalign.common.strict_yaml import parse_yaml
from specalign.formats.published_config import (
    CLIPPED,
    FAMILIES,
    OWN,
    ScheduleSpec,
    hub_config,
    read_plan,
)
from specalign.formats.weights import check_tensors
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import Rotary

_BACKBONE = "backbone."
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_RUN_WEIGHTS = ("checkpoints-meta/checkpoint.pth", "checkpoints/last.ckpt")


@dataclass(frozen=True)
class PublishedNetwork:
    """A published network, in fp32 and evaluation mode, and what its numbers mean.

    family: of `FAMILIES`, or `OWN`. graph: `absorbing` or `uniform`. mask_id: None for `uniform`.
    """

    network: DDiT
    family: str
    graph: str
    schedule: ScheduleSpec
    mask_id: int | None

    @property
    def prediction(self) -> str:
        """`log_score` (SEDD), or `logits`: a softmax over the tokens without the mask."""
        return (
            "log_score" if self.family == "sedd" or self.network.config.scale_by_sigma else "logits"
        )


def load_published(source: str | Path) -> PublishedNetwork:
    """Load a hub id, a hub folder, a training run's folder, or a checkpoint file next to its
    config.

    Raises:
        UserError: missing or unreadable files, or tensors or a config that do not fit.
    """
    path, config_file = find(source)
    content = read_checkpoint(path)
    tensors, averaged = unpack(content, path)
    values = config_values(content, config_file, path)
    prefix = _BACKBONE if any(name.startswith(_BACKBONE) for name in tensors) else ""
    embedding = tensors.get(f"{prefix}vocab_embed.embedding")
    if embedding is None:
        raise UserError(
            f"{path}: no tensor 'vocab_embed.embedding', with or without 'backbone.': not a "
            "checkpoint of "
            f"{', '.join(FAMILIES)}"
        )
    family = _family(values, tensors, prefix)
    plan = read_plan(values, family, str(config_file or path), embedding)
    with torch.device("meta"):
        network = DDiT(plan.config)
    clip = CLIPPED if family == "bd3lm" and any(key in tensors for key in CLIPPED) else ()
    _check_names(tensors, network, prefix, clip, path)
    if averaged is not None:
        _use_averaged(tensors, averaged, network, prefix, path)
    state = {
        name: tensors[prefix + name].to(torch.float32, copy=True) for name in network.state_dict()
    }
    check_tensors(state, str(path))
    table = Rotary(plan.config.head_dim).inv_freq
    if not torch.allclose(
        state["rotary_emb.inv_freq"], table, rtol=0.01
    ):  # half precision rounds it by 0.4%
        raise UserError(f"{path}: rotary_emb.inv_freq is not that of base 10000")
    network.load_state_dict(state, assign=True)
    schedule = plan.schedule
    if clip:
        low, high = (float(tensors[key]) for key in clip)
        schedule = replace(schedule, mask_rates=(low, high))
    return PublishedNetwork(network.eval(), family, plan.graph, schedule, plan.mask_id)


def save_published(
    network: DDiT,
    folder: Path,
    family: str,
    *,
    graph: str = "absorbing",
    schedule: ScheduleSpec | None = None,
    mask_id: int | None = None,
) -> None:
    """Write config.json and model.safetensors in the layout of a family that holds this network
    (`family_for`), in the network's own precision. `mask_id` None = the last id, where the graph
    has a mask."""
    schedule = schedule or ScheduleSpec()
    prefix = _BACKBONE if family in ("mdlm", "bd3lm") else ""
    tensors = {
        prefix + name: t.detach().contiguous().cpu() for name, t in network.state_dict().items()
    }
    if family == "bd3lm" and schedule.mask_rates:
        tensors |= {
            key: torch.tensor(rate) for key, rate in zip(CLIPPED, schedule.mask_rates, strict=True)
        }
    write_atomically(
        folder / "model.safetensors",
        lambda part: save_file(tensors, str(part), metadata={"format": "pt"}),
    )
    write_json(folder / "config.json", hub_config(network.config, family, graph, schedule, mask_id))


def family_for(
    network: DDiT, prediction: str, graph: str, schedule: ScheduleSpec, mask_id: int | None
) -> str:
    """The published family whose config.json gives all of this back, else `OWN`."""
    if network.config.attention == "block_causal":
        family = "bd3lm"
    elif network.config.time_input == "none":
        family = "radd"
    else:
        family = "sedd" if prediction == "log_score" else "mdlm"
    if family in ("mdlm", "bd3lm") and schedule.name != "loglinear":
        return OWN  # their hub config names no schedule
    values = hub_config(network.config, family, graph, schedule, mask_id)
    try:
        reread = read_plan(values, family, "config.json", network.vocab_embed.embedding)
    except UserError:
        return OWN
    return family if (reread.config, reread.graph) == (network.config, graph) else OWN


def _family(values: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> str:
    if values.get("model_type") == OWN:
        return OWN
    if not prefix:
        return "radd" if "blocks.0.norm1.bias" in tensors else "sedd"
    algo = values.get("algo")
    blocks = values.get("model_type") == "bd3lm" or (
        isinstance(algo, dict) and algo.get("name") == "bd3lm"
    )
    return "bd3lm" if blocks else "mdlm"


def _check_names(
    tensors: dict[str, Tensor], network: DDiT, prefix: str, scalars: tuple[str, ...], path: Path
) -> None:
    shapes = {prefix + name: tuple(t.shape) for name, t in network.state_dict().items()}
    shapes |= dict.fromkeys(scalars, ())
    for name, shape in shapes.items():
        if name not in tensors:
            raise UserError(f"{path}: misses tensor {name!r} of shape {shape}")
        if tensors[name].shape != shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(tensors[name].shape)}, expected {shape}"
            )
    for name in tensors:
        if name not in shapes:
            raise UserError(f"{path}: has an unknown tensor {name!r}")


def _use_averaged(
    tensors: dict[str, Tensor], averaged: list[Tensor], network: DDiT, prefix: str, path: Path
) -> None:
    """Replace the parameters by the unnamed averaged ones."""
    parameters = dict(network.named_parameters())
    if len(averaged) != len(parameters):
        raise UserError(
            f"{path}: ema.shadow_params holds {len(averaged)} tensors, but the network has "
            f"{len(parameters)} "
            "parameters (buffers such as rotary_emb.inv_freq are not among them)"
        )
    for i, (name, parameter) in enumerate(parameters.items()):
        if averaged[i].shape != parameter.shape:
            raise UserError(
                f"{path}: ema.shadow_params[{i}] has shape {tuple(averaged[i].shape)}, expected "
                f"{tuple(parameter.shape)} of {name}"
            )
        tensors[prefix + name] = averaged[i]


# ---- files ----


def find(source: str | Path) -> tuple[Path, Path | None]:
    """The file of weights and that of the config, if there is one."""
    path = local_path(source)
    if path.is_file():
        names = ("config.json", ".hydra/config.yaml")
        near = [folder / name for folder in (path.parent, path.parent.parent) for name in names]
        return path, next((p for p in near if p.is_file()), None)
    folder = model_folder(str(source), "checkpoint", ["config.json", *_WEIGHTS])
    config, names = folder / ".hydra" / "config.yaml", _RUN_WEIGHTS
    if not config.is_file():
        config, names = folder / "config.json", _WEIGHTS
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None:
        raise UserError(f"{folder}: no weights, neither {names[0]} nor {names[1]}")
    return weights, config


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of a weights file, without running its code. Raises UserError for an unreadable
    file."""
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        content = load_tensors(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except ForeignObject as error:
        raise UserError(
            f"{error}; if you trust whoever made it, "
            f'convert it once: python -c "import torch; c = torch.load({str(path)!r}, '
            "weights_only=False); "
            "torch.save({k: c[k] for k in ('state_dict', 'model', 'ema') if k in c}, "
            f'{str(path.with_suffix(".weights.pt"))!r})" and keep its .hydra/config.yaml or '
            "config.json next to it"
        ) from None
    except Exception as error:  # unpicklers fail on broken files in many ways
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not readable ({first})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not named tensors")
    return content


def unpack(content: dict[str, Any], path: Path) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """Named tensors, without torch.compile's prefix, and the unnamed averaged ones of a training
    checkpoint."""
    section = next(
        (key for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), None
    )
    named = content if section is None else content[section]
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
    tensors = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in named.items()}
    ema = content.get("ema") if section else None
    if ema is None:
        if section == "model":
            raise UserError(
                f"{path}: misses 'ema', the averaged weights, which are the ones to use"
            )
        return tensors, None
    averaged = ema.get("shadow_params") if isinstance(ema, Mapping) else None
    if not isinstance(averaged, list) or not all(isinstance(tensor, Tensor) for tensor in averaged):
        raise UserError(f"{path}: ema.shadow_params must be a list of tensors")
    return tensors, averaged


def config_values(content: dict[str, Any], config_file: Path | None, path: Path) -> dict[str, Any]:
    """Sizes, graph and noise, out of the checkpoint or its config file, as its code names them."""
    inside = content.get("hyper_parameters")
    if isinstance(inside, Mapping) and isinstance(inside.get("config"), dict):
        return inside["config"]
    if config_file is None:
        raise UserError(
            f"{path}: has no sizes, graph and noise: put its config.json or .hydra/config.yaml "
            "next to it"
        )
    if config_file.suffix == ".json":
        return read_config(config_file.parent)
    values = parse_yaml(read_text(config_file), str(config_file))
    if not isinstance(values, dict):
        raise UserError(f"{config_file}: must hold keys, not a {type(values).__name__}")
    return values
