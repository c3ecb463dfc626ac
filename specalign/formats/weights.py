"""Weights in files: safetensors or pickled tensors, in one piece or in shards with their index."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import TypedDict

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.files import load_safetensors, load_tensors, write_atomically, write_json
from specalign.common.schema import convert, read_json

SAFE = "model.safetensors"


class _Index(TypedDict):
    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """The weights files: safetensors, else pickled tensors; whole or as listed by an index."""
    for whole in (SAFE, "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            names = sorted(
                set(convert(read_json(index), _Index, "", str(index))["weight_map"].values())
            )
            for name in names:
                if Path(name).name != name or not (folder / name).is_file():
                    raise UserError(f"{index}: names {name!r}, which is not in the folder")
            return [folder / name for name in names]
    return []


def read_weights(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors = load_safetensors(file)
        else:
            tensors = load_tensors(file, map_location="cpu")
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: not readable ({(str(error).splitlines() or [''])[0]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file}: is no table of tensors")
    return check_tensors(tensors, str(file))


def check_tensors(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """The tensors. Raises UserError for a packed or complex type, or values that are not finite."""
    for name, tensor in tensors.items():
        real = tensor.is_floating_point()
        if tensor.is_complex() or (real and tensor.element_size() < 2):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{where}: {name} is of type {kind}; weights are float32, float16 or bfloat16"
            )
        if real and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{where}: {name} holds values that are no numbers")
    return tensors


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_size: str = "5GB") -> None:
    """model.safetensors, or shards with their index."""
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for old in folder.glob("model*.safetensors*"):  # another number of shards
        old.unlink()
    for file, names in split.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        write_atomically(folder / file, partial(save_file, part, metadata={"format": "pt"}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{SAFE}.index.json", index)
