"""Does a GGUF file's metadata fit its tensors? What does not is named by its key, before torch is imported or anything is built: heads of
another size would otherwise give another model, or a library's error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from align.common.errors import UserError
from align.common.text import short
from align.gguf.header import OWN, TAKE_FOLDER, Header
from align.gguf.positions import check_positions

_COUNTS = ("block_count", "embedding_length", "feed_forward_length", "context_length", "attention.head_count")
_OPTIONAL = (
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
)
_POSITIVE = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
_MODEL, _TOKENS, _TYPES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "token_type"))
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_RANKED = {"gpt2": _MERGES, "llama": _SCORES}
"""By kind of tokenizer, what says in which order text is put together."""
_SPECIAL = tuple(
    f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding", "unknown")
)
_EMBEDDING = "token_embd.weight"


def check_fits(path: Path, header: Header) -> None:
    """Raises UserError for a value of the metadata that is impossible, missing or at odds with the tensors; of architectures that
    transformers' reader reads, those alone that all have."""
    fit = _Fit(path, header)
    fit.whole_file()
    fit.vocabulary()
    check_positions(path, header)
    if header.architecture in OWN:
        fit.sizes()
        fit.tokenizer()
        fit.layers()
        fit.no_other_tensors()
        fit.rotary()


def check_whole_file(path: Path, header: Header) -> None:
    """Raises UserError for a tensor of an unknown type, or one that ends behind the end of the file."""
    _Fit(path, header).whole_file()


def _times(shape: Sequence[int]) -> str:
    return " × ".join(map(str, shape))


class _Fit:
    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header

    def key(self, name: str) -> str:
        return f"{self.header.architecture}.{name}"

    def get(self, name: str) -> Any:
        return self.header.get(name)

    def refuse(self, key: str, why: str) -> NoReturn:
        value = self.header.values.get(key)
        said = key if value is None else f"{key}={short(value, 40)}"
        raise UserError(f"{self.path}: {said}: {why}")

    def whole(self, name: str, needed: bool = True) -> int | None:
        """A count of at least 1."""
        value = self.get(name)
        if value is None:
            if needed or self.key(name) in self.header.lengths:
                self.refuse(
                    self.key(name), "is not there as a whole number, and the model can't be made without it"
                )
            return None
        if type(value) is not int or value < 1:
            self.refuse(self.key(name), "must be a whole number of at least 1")
        return value

    def whole_file(self) -> None:
        """Each tensor is of a known type and ends within the file."""
        if not self.header.places:
            return
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        size = self.path.stat().st_size
        known = {
            int(kind): GGML_QUANT_SIZES[kind] for kind in GGMLQuantizationType if kind in GGML_QUANT_SIZES
        }
        for name, (kind, start) in self.header.places.items():
            if kind not in known:
                raise UserError(
                    f"{self.path}: tensor {name!r} is of type {kind}, which the package gguf does not know"
                )
            numbers, of_bytes = known[kind]
            end = start + math.prod(self.header.shapes[name]) // numbers * of_bytes
            if end > size:
                raise UserError(
                    f"{self.path}: tensor {name!r} would end at byte {end}, the file has {size}: it is cut off"
                )

    def vocabulary(self) -> None:
        """The embedding has the width that the metadata says, a row for each token, and for the special ones."""
        shape, width = self.header.shapes.get(_EMBEDDING), self.get("embedding_length")
        if shape is None or len(shape) != 2:
            self.refuse(
                _EMBEDDING, "the file has no tensor of that name with two dimensions, so no model is in it"
            )
        rows = shape[0]
        if type(width) is int and width != shape[1]:
            self.refuse(self.key("embedding_length"), f"{_EMBEDDING} is {shape[1]} wide")
        tokens = self.header.lengths.get(_TOKENS)
        if tokens is not None and tokens > rows:
            self.refuse(_TOKENS, f"it lists {tokens} tokens, {_EMBEDDING} has {rows} rows")
        for key in _SPECIAL:
            value = self.header.values.get(key)
            if value is not None and (type(value) is not int or not 0 <= value < (tokens or rows)):
                self.refuse(key, f"is no token's id: there are {tokens or rows}")

    def sizes(self) -> None:
        """What our own converter reads is there."""
        for name in _COUNTS:
            self.whole(name)
        for name in _OPTIONAL:
            self.whole(name, needed=False)
        for name in _POSITIVE:
            value = self.get(name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                self.refuse(self.key(name), "must be a positive number")

    def tokenizer(self) -> None:
        """Its lists are there and are of one length; merges are of its tokens."""
        if (kind := self.header.values.get(_MODEL)) not in _RANKED:
            raise UserError(
                f"{self.path}: GGUF tokenizer {kind!r} is not supported (one of: {', '.join(_RANKED)})"
            )
        count, texts = self.header.lengths.get(_TOKENS), self.header.texts
        for key in (_TOKENS, _TYPES, ranked := _RANKED[kind]):
            if key not in self.header.lengths or key in (_TOKENS, _MERGES) and key not in texts:
                self.refuse(key, "is not there as a list, and the tokenizer can't be made without it")
            if key != _MERGES and self.header.lengths[key] != count:
                self.refuse(key, f"has not one entry for each of {_TOKENS}")
        if ranked != _MERGES:
            return
        known = set(texts[_TOKENS])
        for merge in texts[_MERGES]:
            left, _, right = merge.partition(b" ")
            if not {left, right, left + right} <= known:
                said = short(merge.decode("utf-8", "replace"), 40)
                self.refuse(
                    _MERGES, f"{said}: a merge is of two tokens, with a space between, and makes a third"
                )

    def layers(self) -> None:
        """Heads, widths and the number of layers are those of the tensors."""
        shapes = self.header.shapes
        layers, width, inner = (
            self.whole(n) or 1 for n in ("block_count", "embedding_length", "feed_forward_length")
        )
        heads = self.whole("attention.head_count") or 1
        kv = self.whole("attention.head_count_kv", needed=False) or heads
        size = self.whole("attention.key_length", needed=False) or width // heads
        there = {
            int(name.split(".")[1])
            for name in shapes
            if name.startswith("blk.") and name.split(".")[1].isdecimal()
        }
        if there != set(range(layers)):
            self.refuse(self.key("block_count"), f"the file has tensors of {len(there)} layers")
        wanted = {
            "attn_q": ("attention.head_count", heads * size, width),
            "attn_k": ("attention.head_count_kv", kv * size, width),
            "attn_v": ("attention.head_count_kv", kv * size, width),
            "attn_output": ("attention.head_count", width, heads * size),
            "ffn_gate": ("feed_forward_length", inner, width),
            "ffn_up": ("feed_forward_length", inner, width),
            "ffn_down": ("feed_forward_length", width, inner),
        }
        if (value := self.whole("attention.value_length", needed=False) or size) != size:
            self.refuse(
                self.key("attention.value_length"),
                f"values as wide as keys ({size}) are read alone, not {value}",
            )
        for layer in range(layers):
            for part, (name, *shape) in wanted.items():
                tensor = f"blk.{layer}.{part}.weight"
                found = shapes.get(tensor)
                if found is None and not part.startswith(
                    "ffn"
                ):  # experts: refused where the tensors are read
                    raise UserError(f"{self.path}: the file lacks tensor {tensor!r}")
                if found is not None and found != tuple(shape):
                    others = (
                        ("attention.head_count", "attention.key_length") if part.startswith("attn") else ()
                    )
                    beside = [f"{self.key(o)}={self.get(o)}" for o in others if o != name and self.get(o)]
                    by = f" by {' and '.join(beside)}" if beside else ""
                    self.refuse(
                        self.key(name), f"{tensor} would be {_times(shape)}{by}, it is {_times(found)}"
                    )
        if heads % kv:
            self.refuse(self.key("attention.head_count_kv"), f"{heads} heads are no multiple of it")
        if "output_norm.weight" not in shapes:
            raise UserError(f"{self.path}: the file lacks tensor 'output_norm.weight'")

    def no_other_tensors(self) -> None:
        """Experts, and biases where the architecture has none, would be left out of the model."""
        for tensor in self.header.shapes:
            part, _, kind = tensor.rpartition(".")
            biased = self.header.architecture == "qwen2" and part.endswith((".attn_q", ".attn_k", ".attn_v"))
            if kind == "bias" and not biased or part.endswith(("_exps", "_shexp", ".ffn_gate_inp")):
                raise UserError(
                    f"{self.path}: tensor {tensor!r} has no place in a GGUF file of {self.header.architecture!r} as it is read here: {TAKE_FOLDER}"
                )

    def rotary(self) -> None:
        """Positions turn whole heads."""
        heads, width = self.whole("attention.head_count") or 1, self.whole("embedding_length") or 1
        size = self.whole("attention.key_length", needed=False) or width // heads
        turned = self.whole("rope.dimension_count", needed=False) or size
        if turned != size:
            self.refuse(
                self.key("rope.dimension_count"),
                f"heads are {size} wide, and rotary positions of whole heads are read alone",
            )
