"""Finds GGUF files, and reads and checks their headers without importing torch."""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
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
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9
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
class StoredTensor:
    """Where a tensor is stored: shape in torch's order, GGML type number, byte offset."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensor table of a file."""

    values: JsonObject
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        """A value of the architecture's own keys, None if absent."""
        return self.values.get(self.key(name))


def read_header(path: Path) -> Header:
    """Read a file's header. Raises UserError: the file is not GGUF, its header is damaged, or it is
    a part of a split model."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _HeaderReader(data).read_header()
    except (struct.error, ValueError, OverflowError, KeyError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({error})") from None
    if header.values.get("split.count", 1) not in (0, 1):
        raise UserError(f"{path}: a part of a split model; join it: llama-gguf-split --merge")
    return header


class _HeaderReader:
    """Reads values one after the other, from `position` on."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 4

    def read_header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self.read_number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} is not supported (2 and 3 are)")
        tensor_count, value_count = self.read_number("Q"), self.read_number("Q")
        values = {self.read_text(): self.read_value() for _ in range(value_count)}
        stored = [self.read_tensor() for _ in range(tensor_count)]
        alignment = max(1, values.get("general.alignment", 32))
        start = math.ceil(self.position / alignment) * alignment
        return Header(values, {n: StoredTensor(s, k, start + at) for n, s, k, at in stored})

    def read_number(self, form: str) -> Any:
        value = struct.unpack_from(f"<{form}", self.data, self.position)[0]
        self.position += struct.calcsize(f"<{form}")
        return value

    def read_text(self) -> str:
        length = self.read_number("Q")
        text = self.data[self.position : self.position + length]
        if len(text) < length:
            raise ValueError("its header is cut off")
        self.position += length
        return text.decode("utf-8", "replace")

    def read_value(self) -> Any:
        kind = self.read_number("I")
        if kind in _NUMBERS:
            return self.read_number(_NUMBERS[kind])
        return self.read_text() if kind == _STRING else self.read_array(kind)

    def read_array(self, kind: int) -> list[Any]:
        inner = self.read_number("I") if kind == _ARRAY else kind
        if inner != _STRING and inner not in _NUMBERS:
            raise ValueError(f"metadata of unknown type {inner}")
        length = self.read_number("Q")
        if inner == _STRING:
            return [self.read_text() for _ in range(length)]
        form = f"<{length}{_NUMBERS[inner]}"
        start = self.position
        self.position += struct.calcsize(form)
        return list(struct.unpack_from(form, self.data, start))

    def read_tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, shape, type, and offset in the data section."""
        name = self.read_text()
        dimensions = self.read_number("I")
        if dimensions > 8:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = [self.read_number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(shape)), self.read_number("I"), self.read_number("Q")


def check_header(path: Path, header: Header) -> None:
    """Check that transformers can turn the file into the model it describes. Raises UserError:
    unknown architecture, truncated file, or what no config can express."""
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        hint = nearest(architecture, ARCHITECTURES)
        raise UserError(
            f"{path}: GGUF architecture {architecture!r} is not supported{hint}; {HINT}"
        )
    _check_tensors(path, header)
    for name in ("block_count", "embedding_length", "context_length"):
        value = header.get(name)
        if type(value) is not int or value < 1:
            key = f"{header.key(name)}={short(value, 40)}"
            raise UserError(f"{path}: {key}: must be a positive integer")
    embedding = header.tensors.get(EMBEDDING)
    tokens = len(header.values.get("tokenizer.ggml.tokens", ()))
    if embedding is None or len(embedding.shape) != 2 or embedding.shape[0] < tokens:
        raise UserError(f"{path}: has no tensor {EMBEDDING!r} with a row for each of its tokens")
    layers = len({name.split(".")[1] for name in header.tensors if name.startswith("blk.")})
    sizes = (header.get("block_count"), header.get("embedding_length"))
    if sizes != (layers, embedding.shape[1]):
        raise UserError(
            f"{path}: says {sizes[0]} layers of width {sizes[1]}, but has tensors of {layers} "
            f"layers of width {embedding.shape[1]}"
        )
    for name in ("rope_factors_long.weight", "rope_factors_short.weight", ROPE_FACTORS):
        if name in header.tensors and (name, architecture) != (ROPE_FACTORS, "llama"):
            raise UserError(f"{path}: rotary factors {name!r} are not supported; {HINT}")
    kind = header.get("rope.scaling.type")
    if rope_scale(header) != 1 and kind not in (None, "linear"):
        key = header.key("rope.scaling.type")
        raise UserError(f"{path}: {key}={short(kind, 40)}: not supported; {HINT}")


def _check_tensors(path: Path, header: Header) -> None:
    """Every tensor has a known type and ends within the file."""
    from gguf.constants import GGML_QUANT_SIZES

    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    size = path.stat().st_size
    for name, tensor in header.tensors.items():
        if tensor.kind not in block_sizes:
            raise UserError(f"{path}: tensor {name!r} is of unknown type {tensor.kind}")
        elements, block_bytes = block_sizes[tensor.kind]
        end = tensor.start + math.prod(tensor.shape) // elements * block_bytes
        if end > size:
            raise UserError(
                f"{path}: truncated: tensor {name!r} ends at byte {end}, but the file has {size} "
                "bytes"
            )


def rope_scale(header: Header) -> float:
    """The factor by which positions are divided; files from 2023 use another key."""
    scale = header.get("rope.scaling.factor")
    if scale is None:
        scale = header.get("rope.scale_linear")
    return 1.0 if header.get("rope.scaling.type") == "none" or not scale else float(scale)
