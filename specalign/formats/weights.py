"""Weights in files: safetensors or pickled tensors, in one piece or in shards with their index."""

import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.files import load_safetensors, load_tensors, write_atomically, write_json
from specalign.common.schema import convert, read_object

SAFE = "model.safetensors"
INDEX = f"{SAFE}.index.json"


def weight_files(folder: Path) -> list[Path]:
    """The weights files: safetensors, else pickled tensors; whole or as an index lists them."""
    for whole in (SAFE, "pytorch_model.bin"):
        if (folder / whole).exists():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            shards = read_object(index).get("weight_map")
            shards = convert(shards, dict[str, str], "weight_map", str(index)).values()
            for name in shards:
                if Path(name).name != name or not (folder / name).is_file():
                    raise UserError(f"{index}: names {name!r}, which is not in the folder")
            return [folder / name for name in sorted(set(shards))]
    return []


def read_folder(folder: Path, what: str) -> dict[str, Tensor]:
    """All tensors of a folder; `what`: for messages. Raises UserError for none, or broken ones."""
    files = weight_files(folder)
    if not files:
        raise UserError(f"{what}: {folder} has neither {SAFE} nor pytorch_model.bin")
    return {name: tensor for file in files for name, tensor in read_weights(file).items()}


def read_weights(file: Path) -> dict[str, Tensor]:
    """The tensors of a file. Raises UserError for an unreadable file, a packed or complex type, or
    values that are not finite."""
    safe = file.suffix == ".safetensors"
    try:
        tensors = load_safetensors(file) if safe else load_tensors(file, map_location="cpu")
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: not readable ({(str(error).splitlines() or [''])[0]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file}: is not a dict of tensors")
    for name, tensor in tensors.items():
        real = tensor.is_floating_point()
        if tensor.is_complex() or (real and tensor.element_size() < 2):
            kind = f"is of type {str(tensor.dtype).removeprefix('torch.')}"
            raise UserError(f"{file}: {name} {kind}; weights are float32, float16 or bfloat16")
        if real and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{file}: {name} contains non-finite values")
    return tensors


def check_shapes(
    tensors: Mapping[str, Tensor], expected: Mapping[str, torch.Size], where: str
) -> None:
    """Raises UserError unless these are exactly the expected tensors."""
    for name, shape in expected.items():
        if name not in tensors:
            raise UserError(f"{where}: missing tensor {name!r} of shape {tuple(shape)}")
        if tensors[name].shape != shape:
            found = tuple(tensors[name].shape)
            raise UserError(f"{where}: {name} has shape {found}, expected {tuple(shape)}")
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{where}: has an unknown tensor {name!r}")


def save_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, written atomically."""
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_atomically(file, partial(save_file, stored, metadata={"format": "pt"}))


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_size: str = "5GB") -> None:
    """model.safetensors, or shards with their index."""
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for old in folder.glob("model*.safetensors*"):  # another number of shards
        old.unlink()
    for file, names in split.filename_to_tensors.items():
        save_tensors(folder / file, {name: tensors[name] for name in names})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index)
