"""Finds GGUF files, and reads and checks their headers."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.gguf_reader import GGUFReader, ReaderTensor

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.schema import JsonObject
from specalign.common.text import cut, short

ARCHITECTURES = (
    "bloom", "falcon", "gemma2", "gemma3", "gpt2", "lfm2", "llama", "mamba", "minimax-m2", "nemotron",
    "phi3", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "stablelm", "starcoder2",
)  # fmt: skip
"""GGUF architectures that transformers reads correctly, which gpt-oss, gemma4 and mistral are
not."""
HINT = "use the model's hub-layout folder"
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"
_WEIGHTS = re.compile(r".+\.safetensors|.+\.index\.json|pytorch_model.*\.bin")


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF: by its first four bytes, or by its suffix if it cannot be read."""
    named_gguf = path.suffix.lower() == ".gguf" and not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" or named_gguf
    except OSError:
        return named_gguf


def gguf_of_folder(folder: Path) -> Path | None:
    """The GGUF model in a folder, None without one. Image projectors (`mmproj`) are skipped. Raises
    UserError: the folder holds several models."""
    paths = _gguf_models(folder)
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"{folder}: contains several GGUF models; choose one: {cut(names, 200)}")
    return paths[0] if paths else None


def is_hub_layout(folder: Path) -> bool:
    """Whether a folder is in hub layout: a config.json with weights, or without a GGUF file."""
    has_weights = any(_WEIGHTS.fullmatch(path.name) for path in folder.glob("*"))
    has_config = (folder / "config.json").is_file()
    return has_config and (has_weights or not _gguf_models(folder))


def _gguf_models(folder: Path) -> list[Path]:
    named = [path for path in folder.glob("*") if path.suffix.lower() == ".gguf"]
    return sorted(p for p in named if p.is_file() and "mmproj" not in p.name.lower())


@dataclass(frozen=True)
class Header:
    """Metadata and tensor table of a file. Shapes are in GGML's order: rows of a matrix last."""

    values: JsonObject
    tensors: Mapping[str, ReaderTensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        """A value of the architecture's own keys, None if absent."""
        return self.values.get(self.key(name))


class _Reader(GGUFReader):
    """Its base class reads on beyond the end of the file."""

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ValueError(f"truncated: it ends after {len(self.data)} bytes")
        return super()._get(offset, dtype, count, override_order)


def read_header(path: Path) -> Header:
    """Read a file's header. Raises UserError: the file is not GGUF, is truncated or damaged, or is
    a part of a split model."""
    with in_one_line(f"{path}: not a readable GGUF file"):
        reader = _Reader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
    if values.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: a part of a split model; join it: llama-gguf-split --merge")
    return Header(values, {tensor.name: tensor for tensor in reader.tensors})


def check_header(path: Path, header: Header) -> None:
    """Check that transformers can turn the file into the model it describes. Raises UserError:
    unknown architecture, truncated file, or what no config can express."""
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        hint = nearest(architecture, ARCHITECTURES)
        raise UserError(
            f"{path}: GGUF architecture {architecture!r} is not supported{hint}; {HINT}"
        )
    for name in ("block_count", "embedding_length", "context_length"):
        value = header.get(name)
        if type(value) is not int or value < 1:
            key = f"{header.key(name)}={short(value, 40)}"
            raise UserError(f"{path}: {key}: must be a positive integer")
    embedding = header.tensors.get(EMBEDDING)
    tokens = len(header.values.get("tokenizer.ggml.tokens", ()))
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[1] < tokens:
        raise UserError(f"{path}: has no tensor {EMBEDDING!r} with a row for each of its tokens")
    layers = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    sizes = (header.get("block_count"), header.get("embedding_length"))
    if sizes != (layers, embedding.shape[0]):
        raise UserError(
            f"{path}: says {sizes[0]} layers of width {sizes[1]}, but has tensors of {layers} "
            f"layers of width {embedding.shape[0]}"
        )
    for name in ("rope_factors_long.weight", "rope_factors_short.weight", ROPE_FACTORS):
        if name in header.tensors and (name, architecture) != (ROPE_FACTORS, "llama"):
            raise UserError(f"{path}: rotary factors {name!r} are not supported; {HINT}")
    kind = header.get("rope.scaling.type")
    if rope_scale(header) != 1 and kind not in (None, "linear"):
        key = header.key("rope.scaling.type")
        raise UserError(f"{path}: {key}={short(kind, 40)}: not supported; {HINT}")


def rope_scale(header: Header) -> float:
    """The factor by which positions are divided; files from 2023 use another key."""
    scale = header.get("rope.scaling.factor")
    if scale is None:
        scale = header.get("rope.scale_linear")
    return 1.0 if header.get("rope.scaling.type") == "none" or not scale else float(scale)
