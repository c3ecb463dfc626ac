"""Reads and checks the header of a GGUF file, in milliseconds and without importing torch."""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from specalign.common.errors import UserError, nearest
from specalign.common.schema import JsonObject
from specalign.common.text import short

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
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is stored: shape in torch's order, GGML type number, byte offset in its file.

    file: of a split model the part that holds it.
    """

    shape: tuple[int, ...]
    kind: int
    start: int
    file: Path | None = None


@dataclass(frozen=True)
class Header:
    """Metadata and tensor table of a model. Arrays of the metadata are lists, or their lengths if
    not asked for."""

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

    @property
    def sizes(self) -> JsonObject:
        """Sizes under config.json's names."""
        found = {name: self.get(key) for name, key in _SIZES.items()}
        return {name: value for name, value in found.items() if value is not None}


def read_header(path: Path, arrays: bool = False) -> Header:
    """Read a file's header; of a split model that of all its parts. `arrays`: also read the
    metadata's arrays.

    Raises:
        UserError: the file is not GGUF, its header is damaged, or a part is missing.
    """
    first, *others = split_parts(path)
    header = _read_part(first, arrays)
    for part in others:
        header.tensors.update(_read_part(part, False).tensors)
    return header


def split_parts(path: Path) -> list[Path]:
    """The files of a model: the file itself, or all parts of a split model, found by the name of
    one.

    Raises:
        UserError: a damaged header, or a part is missing.
    """
    count = _read_part(path, False).values.get("split.count") or 1
    if count == 1:
        return [path]
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    parts = [path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(
                f"{path}: one of {count} parts of a split GGUF file; {part.name} is missing"
            )
    return parts


def _read_part(path: Path, arrays: bool) -> Header:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data, arrays).read_header()
    except (struct.error, ValueError, OverflowError, ZeroDivisionError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({error})") from None


class _HeaderReader:
    def __init__(self, path: Path, data: mmap.mmap, arrays: bool) -> None:
        self.path = path
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
        values: JsonObject = {}
        for _ in range(value_count):
            key = self.read_text()
            values[key] = self.read_value(self.read_number("I"))
        tensors = dict(self.read_tensor() for _ in range(tensor_count))
        if self.position > len(self.data):
            raise ValueError("its header is cut off")
        alignment = values.get("general.alignment", 32)
        start = math.ceil(self.position / alignment) * alignment
        placed = {
            n: StoredTensor(t.shape, t.kind, start + t.start, self.path) for n, t in tensors.items()
        }
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
        UserError: unknown architecture, truncated file, or metadata that the tensors contradict.
    """
    architecture = header.architecture
    if architecture not in ARCHITECTURES:
        hint = nearest(architecture, ARCHITECTURES)
        raise UserError(
            f"{path}: GGUF architecture {architecture!r} is not supported{hint}; {HINT}"
        )
    for name in ("block_count", "embedding_length", "context_length"):
        value = header.get(name)
        if type(value) is not int or value < 1:
            _refuse(path, header, header.key(name), "must be a positive integer")
    _check_tensors(path, header)
    _check_vocabulary(path, header)
    _check_rope(path, header)


def _refuse(path: Path, header: Header, key: str, why: str) -> NoReturn:
    value = header.values.get(key)
    shown = key if value is None else f"{key}={short(value, 40)}"
    raise UserError(f"{path}: {shown}: {why}")


def _check_tensors(path: Path, header: Header) -> None:
    """Every tensor has a known type and ends within the file, and no layer is missing or left
    over."""
    from gguf.constants import GGML_QUANT_SIZES

    layers = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if len(layers) != header.get("block_count"):
        _refuse(path, header, header.key("block_count"), f"has tensors of {len(layers)} layers")
    block_sizes = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    for name, tensor in header.tensors.items():
        file = tensor.file or path
        if tensor.kind not in block_sizes:
            raise UserError(f"{file}: tensor {name!r} is of unknown type {tensor.kind}")
        elements, block_bytes = block_sizes[tensor.kind]
        end = tensor.start + math.prod(tensor.shape) // elements * block_bytes
        if end > file.stat().st_size:
            raise UserError(
                f"{file}: truncated: tensor {name!r} ends at byte {end}, the file has "
                f"{file.stat().st_size}"
            )


def _check_vocabulary(path: Path, header: Header) -> None:
    """The embedding is as wide as the metadata says, and has a row for every token."""
    tensor = header.tensors.get(EMBEDDING)
    if tensor is None or len(tensor.shape) != 2:
        raise UserError(
            f"{path}: has no two-dimensional tensor {EMBEDDING!r}, so it holds no model"
        )
    rows, width = tensor.shape
    if header.get("embedding_length") != width:
        _refuse(path, header, header.key("embedding_length"), f"{EMBEDDING} has width {width}")
    tokens = header.values.get("tokenizer.ggml.tokens", rows)
    count = len(tokens) if isinstance(tokens, list) else tokens
    if count > rows:
        raise UserError(
            f"{path}: tokenizer.ggml.tokens lists {count} tokens, {EMBEDDING} has {rows} rows"
        )
    for name in ("bos", "eos", "eot", "eom", "padding", "unknown"):
        key = f"tokenizer.ggml.{name}_token_id"
        value = header.values.get(key, 0)
        if type(value) is not int or not 0 <= value < count:
            _refuse(path, header, key, f"must be a token id below {count}")


def _check_rope(path: Path, header: Header) -> None:
    """Rotary scaling is one that can be written into a config."""
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        value = header.get(name)
        if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
            _refuse(path, header, header.key(name), "must be a non-negative number")
    kind = header.get("rope.scaling.type")
    if rope_scale(header) != 1 and kind not in (None, "linear"):
        _refuse(path, header, header.key("rope.scaling.type"), f"not supported; {HINT}")
    for tensor in ("rope_factors_long.weight", "rope_factors_short.weight", ROPE_FACTORS):
        supported = tensor == ROPE_FACTORS and header.architecture == "llama"
        if tensor in header.tensors and not supported:
            raise UserError(
                f"{path}: rotary factors ({tensor!r}) of {header.architecture!r} are not "
                f"supported; {HINT}"
            )


def rope_scale(header: Header) -> float:
    """What positions are divided by. Files of 2023 have another key; without a type it is
    linear."""
    scale = header.get("rope.scaling.factor")
    if scale is None:
        scale = header.get("rope.scale_linear")
    return 1.0 if header.get("rope.scaling.type") == "none" or not scale else float(scale)
