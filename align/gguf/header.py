"""The header of a GGUF file, read in milliseconds and without torch: what is wrong is said before anything is imported or built."""

from __future__ import annotations

import ast
import importlib.util
import mmap
import struct
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from align.common.errors import UserError, nearest

OWN = ("llama", "qwen2", "qwen3")
"""The architectures that our own converter reads; others go through transformers' reader."""
TAKE_FOLDER = "take the model's folder in hub layout"
"""What helps where a file says more than is read of it."""
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _MOST_DIMENSIONS = 8, 9, 8
_KEPT = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges")
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}


class Header(NamedTuple):
    """values: the numbers and strings of the metadata, without its arrays. types: how many tensors there are of each of GGUF's types, by
    its number. shapes: of the tensors, by name, as torch has them. lengths: of the metadata's arrays. places: of the tensors, by name: their
    type and where in the file they begin."""

    values: dict[str, Any]
    types: dict[int, int]
    shapes: dict[str, tuple[int, ...]]
    lengths: dict[str, int]
    places: dict[str, tuple[int, int]] = {}
    texts: dict[str, list[bytes]] = {}

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture"))

    def get(self, name: str) -> Any:
        """The value of one of the architecture's own keys; None where it is not there."""
        return self.values.get(f"{self.architecture}.{name}")

    @property
    def parts(self) -> int:
        """How many files the model is split into."""
        return int(self.values.get("split.count") or 1)

    @property
    def names(self) -> dict[str, str]:
        """A config.json's names of sizes, and the file's own."""
        return {key: f"{self.architecture}.{name}" for key, name in _SIZES.items()}

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes under a config.json's names."""
        return {key: self.values[name] for key, name in self.names.items() if name in self.values}


def read_header(path: Path) -> Header:
    """Raises UserError for a file that is not GGUF, or whose header does not end within it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except UserError:
        raise
    except (struct.error, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a readable GGUF file ({type(error).__name__}: {error})") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self.path, self.data, self.at = path, data, 4
        self.order = ">" if struct.unpack_from("<I", data, 4)[0] & 0xFFFF == 0 else "<"

    def header(self) -> Header:
        self.number("I")
        tensors, pairs = self.number("Q"), self.number("Q")
        values: dict[str, Any] = {}
        lengths: dict[str, int] = {}
        texts: dict[str, list[bytes]] = {}
        for _ in range(pairs):
            key, kind = self.text(), self.number("I")
            if kind == _ARRAY:
                kept: list[bytes] = []
                lengths[key] = self.array(kept if key in _KEPT else None)
                if len(kept) == lengths[key]:
                    texts[key] = kept
            else:
                values[key] = self.value(kind)
        shapes: dict[str, tuple[int, ...]] = {}
        places: dict[str, tuple[int, int]] = {}
        for _ in range(tensors):
            name, dimensions = self.text(), self.number("I")
            if dimensions > _MOST_DIMENSIONS:
                raise ValueError(f"a tensor of {dimensions} dimensions")
            shapes[name] = tuple(reversed([self.number("Q") for _ in range(dimensions)]))
            places[name] = self.number("I"), self.number("Q")
        line = values.get("general.alignment", 32)
        if type(line) is not int or line < 1:
            raise ValueError(f"general.alignment={line}")
        start = -(-self.at // line) * line
        types = Counter(kind for kind, _ in places.values())
        places = {name: (kind, start + at) for name, (kind, at) in places.items()}
        return Header(values, dict(types), shapes, lengths, places, texts)

    def number(self, form: str) -> Any:
        value = struct.unpack_from(self.order + form, self.data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        return self._bytes(self.number("Q")).decode("utf-8", "replace")

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise ValueError(f"a text of {count} bytes")
        self.at += count
        return self.data[self.at - count : self.at]

    def value(self, kind: int) -> Any:
        """A value; None for an array."""
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise ValueError(f"unknown type {kind}")
        self.array()
        return None

    def array(self, kept: list[bytes] | None = None) -> int:
        """Pass over an array; its length. `kept`: where its texts are put."""
        inner, count = self.number("I"), self.number("Q")
        size = struct.calcsize(_NUMBERS[inner]) if inner in _NUMBERS else 8
        if count * size > len(self.data) - self.at:  # its reader would go on behind the end of the file
            raise UserError(f"{self.path}: not a readable GGUF file (an array of {count} values)")
        if inner in _NUMBERS:
            self.at += count * size
        elif inner == _STRING:
            for _ in range(count):
                length = self.number("Q")
                if length > len(self.data) - self.at:
                    raise ValueError(f"a text of {length} bytes")
                self.at += length
                if kept is not None:
                    kept.append(self.data[self.at - length : self.at])
        else:
            for _ in range(count):
                self.value(inner)
        return int(count)


_UNREAD = {
    "gptoss": "leaves out the experts of",
    "gemma4": "leaves out the layers' scales of",
    "deci": "has no model for",
    "mistral": "knows no tensors (llama.cpp's files of Mistral say 'llama') of",
}
"""Architectures that its list names and that it can't read: names of tensors are others than llama.cpp's, and it takes for one number
what Gemma 4 has for each layer; DeciLM's files name a model that transformers does not have. llama.cpp writes Mistral as `llama` and opens no
file that says `mistral`: how the rows of such a file's queries and keys lie is not known."""


def check_known(path: Path, header: Header) -> None:
    """Raises UserError for an architecture that no reader here knows."""
    architecture = header.architecture
    theirs = read_by_transformers()
    if architecture not in OWN and _plain(architecture) not in map(_plain, theirs):
        read = [name for name in (*OWN, *theirs) if _plain(name) not in _UNREAD]
        raise UserError(
            f"{path}: GGUF architecture {architecture!r} is not supported{nearest(architecture, read)}"
        )
    if (why := _UNREAD.get(_plain(architecture))) is not None:
        raise UserError(f"{path}: transformers' reader {why} {architecture!r}: {TAKE_FOLDER}")


def _plain(name: str) -> str:
    """GGUF writes gpt-oss and qwen2moe where transformers writes gpt_oss and qwen2_moe."""
    return name.replace("-", "").replace("_", "")


_LISTS = {"ggml.py": "GGUF_CONFIG_MAPPING", "gguf/gguf_config_mapping.py": "GGUF_CONFIG_ARCHS"}
"""Where the installed transformers' GGUF reader names its architectures: its older half and its newer one."""


@cache
def read_by_transformers() -> frozenset[str]:
    """The architectures of the installed transformers' GGUF reader, read off its source: importing it takes seconds."""
    spec = importlib.util.find_spec("transformers")
    names: set[str] = set()
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file, variable in _LISTS.items():
            source = Path(folder) / "integrations" / file
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if source.is_file() else ():
                if isinstance(node, ast.Assign) and variable in map(ast.unparse, node.targets):
                    keys = node.value.keys if isinstance(node.value, ast.Dict) else []
                    names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
    return frozenset(names - {"general", "tokenizer", "t5", "umt5"})
