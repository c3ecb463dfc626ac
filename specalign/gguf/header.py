"""Reads and checks the header of a GGUF file, in milliseconds and without importing torch."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")
"""GGUF architectures whose config is read exactly; SmolLM's files are of `llama`."""
HINT = "use the model's hub-layout folder"
EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"
_NUMBERS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored: shape in torch's order, GGML type number, byte offset."""

    shape: tuple[int, ...]
    kind: int
    start: int


@dataclass(frozen=True)
class Header:
    """Metadata and tensor table of a model. Arrays of the metadata are lists, or their lengths if
    not asked for."""

    values: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, name: str) -> Any:
        """A value of the architecture's own keys, None if absent."""
        return self.values.get(f"{self.architecture}.{name}")

    @property
    def rope_scale(self) -> float:
        """What positions are divided by. Files of 2023 have another key."""
        scale = self.get("rope.scaling.factor") or self.get("rope.scale_linear")
        return 1.0 if self.get("rope.scaling.type") == "none" or not scale else float(scale)


def read_header(path: Path, arrays: bool = False) -> Header:
    """Read a file's header. `arrays`: also read the metadata's arrays.

    Raises:
        UserError: the file is not GGUF, or its header is damaged.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, arrays).read_header()
    except (struct.error, ValueError, OverflowError, ZeroDivisionError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({error})") from None


class _Reader:
    def __init__(self, data: mmap.mmap, arrays: bool) -> None:
        self.data = data
        self.arrays = arrays
        self.position = 4

    def read_header(self) -> Header:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self.read_number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}, supported are 2 and 3")
        tensor_count = self.read_number("Q")
        value_count = self.read_number("Q")
        values: dict[str, Any] = {}
        for _ in range(value_count):
            key = self.read_text()
            values[key] = self.read_value(self.read_number("I"))
        tensors = dict(self.read_tensor() for _ in range(tensor_count))
        if self.position > len(self.data):
            raise ValueError("its header is cut off")
        alignment = values.get("general.alignment", 32)
        start = math.ceil(self.position / alignment) * alignment
        placed = {n: StoredTensor(t.shape, t.kind, start + t.start) for n, t in tensors.items()}
        return Header(values, placed)

    def read_number(self, form: str) -> Any:
        value = struct.unpack_from(f"<{form}", self.data, self.position)[0]
        self.position += struct.calcsize(f"<{form}")
        return value

    def read_text(self) -> str:
        length = self.read_number("Q")
        text = self.data[self.position : self.position + length]
        self.position += length
        return text.decode("utf-8", "replace")

    def read_value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.read_number(_NUMBERS[kind])
        if kind == _STRING:
            return self.read_text()
        if kind == _ARRAY:
            return self.read_array()
        raise ValueError(f"metadata of unknown type {kind}")

    def read_array(self) -> Any:
        """The array's values; its length if arrays are not read."""
        kind = self.read_number("I")
        length = self.read_number("Q")
        if kind in _NUMBERS:
            form = f"<{length}{_NUMBERS[kind]}"
            start = self.position
            self.position += struct.calcsize(form)
            return list(struct.unpack_from(form, self.data, start)) if self.arrays else length
        if kind != _STRING:
            raise ValueError(f"an array of type {kind}")
        if self.arrays:
            return [self.read_text() for _ in range(length)]
        for _ in range(length):
            size = self.read_number("Q")
            self.position += size
        return length

    def read_tensor(self) -> tuple[str, StoredTensor]:
        """A tensor's name and entry; its offset is relative to the data section."""
        name = self.read_text()
        dimensions = self.read_number("I")
        if dimensions > 8:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        shape = [self.read_number("Q") for _ in range(dimensions)]
        kind = self.read_number("I")
        return name, StoredTensor(tuple(reversed(shape)), kind, self.read_number("Q"))


def check_header(path: Path, header: Header) -> None:
    """Check that transformers can turn the file into the model it describes.

    Raises:
        UserError: unknown architecture, one of several parts, a truncated file, metadata that the
            tensors contradict, or rotary scaling that no config can express.
    """
    name = header.architecture
    if name not in ARCHITECTURES:
        hint = nearest(name, ARCHITECTURES)
        raise UserError(f"{path}: GGUF architecture {name!r} is not supported{hint}; {HINT}")
    if (header.values.get("split.count") or 1) > 1:
        raise UserError(f"{path}: one of several parts; join them (llama-gguf-split --merge)")
    tokenizer = header.values.get("tokenizer.ggml.model")
    if tokenizer != "gpt2":
        raise UserError(f"{path}: tokenizer {tokenizer!r} is not byte-level BPE; {HINT}")
    _check_tensors(path, header)
    scaling = header.get("rope.scaling.type")
    if header.rope_scale != 1 and scaling not in (None, "linear"):
        raise UserError(f"{path}: {name}.rope.scaling.type={scaling!r}: not supported; {HINT}")
    if ROPE_FACTORS in header.tensors and name != "llama":
        raise UserError(f"{path}: rotary factors of {name!r} are not supported; {HINT}")


def _check_tensors(path: Path, header: Header) -> None:
    """An embedding, as many layers as the metadata says, and no tensor beyond the file's end."""
    from gguf.constants import GGML_QUANT_SIZES

    name = header.architecture
    embedding = header.tensors.get(EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(
            f"{path}: has no two-dimensional tensor {EMBEDDING!r}, so it holds no model"
        )
    layers = {tensor.split(".")[1] for tensor in header.tensors if tensor.startswith("blk.")}
    sizes = {"block_count": len(layers), "embedding_length": embedding.shape[1]}
    for key, size in sizes.items():
        if header.get(key) != size:
            raise UserError(f"{path}: {name}.{key}={header.get(key)}: its tensors have {size}")
    block_sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
    for tensor_name, tensor in header.tensors.items():
        if tensor.kind not in block_sizes:
            raise UserError(f"{path}: tensor {tensor_name!r} is of unknown type {tensor.kind}")
        elements, block_bytes = block_sizes[tensor.kind]
        end = tensor.start + math.prod(tensor.shape) // elements * block_bytes
        if end > path.stat().st_size:
            raise UserError(
                f"{path}: truncated: tensor {tensor_name!r} ends at byte {end}, the file has "
                f"{path.stat().st_size}"
            )
