"""Files of published checkpoints: where weights and config are, and what is in them."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from align.common.errors import UserError
from align.common.files import ForeignObject, load_safetensors, load_tensors, read_text
from align.common.hub import local_path, model_folder
from align.common.schema import read_config
from align.common.strict_yaml import parse_yaml

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_RUN_WEIGHTS = ("checkpoints-meta/checkpoint.pth", "checkpoints/last.ckpt")


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
    """The content of a weights file, without running its code. Raises UserError for an unreadable file."""
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path)
        content = load_tensors(path, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except ForeignObject as error:
        raise UserError(
            f"{error}; if you trust whoever made it, "
            f'convert it once: python -c "import torch; c = torch.load({str(path)!r}, weights_only=False); '
            "torch.save({k: c[k] for k in ('state_dict', 'model', 'ema') if k in c}, "
            f'{str(path.with_suffix(".weights.pt"))!r})" and keep its .hydra/config.yaml or config.json next to it'
        ) from None
    except Exception as error:  # unpicklers fail on broken files in many ways
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path}: not readable ({first})") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a {type(content).__name__}, not named tensors")
    return content


def unpack(content: dict[str, Any], path: Path) -> tuple[dict[str, Tensor], list[Tensor] | None]:
    """Named tensors, without torch.compile's prefix, and the unnamed averaged ones of a training checkpoint."""
    section = next((key for key in ("state_dict", "model") if isinstance(content.get(key), Mapping)), None)
    named = content if section is None else content[section]
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise UserError(f"{path}: {name!r} is a {type(tensor).__name__}, not a tensor")
    tensors = {str(name).replace("_orig_mod.", ""): tensor for name, tensor in named.items()}
    ema = content.get("ema") if section else None
    if ema is None:
        if section == "model":
            raise UserError(f"{path}: misses 'ema', the averaged weights, which are the ones to use")
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
            f"{path}: has no sizes, graph and noise: put its config.json or .hydra/config.yaml next to it"
        )
    if config_file.suffix == ".json":
        return read_config(config_file.parent)
    values = parse_yaml(read_text(config_file), str(config_file))
    if not isinstance(values, dict):
        raise UserError(f"{config_file}: must hold keys, not a {type(values).__name__}")
    return values
