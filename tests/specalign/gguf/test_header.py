"""GGUF headers: what is read, and which files are refused before torch is imported."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.gguf.header import (
    Header,
    StoredTensor,
    check_header,
    gguf_of_folder,
    is_gguf,
    is_hub_layout,
    read_header,
    rope_scale,
)
from specalign.lm.loading import load_target
from specalign.lm.names import check_name
from tests.target_models import write_gguf

FILE = Path(__file__)
VALUES = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.context_length": 64,
    "tokenizer.ggml.tokens": [*"abcde"],
    "tokenizer.ggml.eos_token_id": 4,
}
TENSORS = {
    "token_embd.weight": StoredTensor((6, 8), 0, 0),
    "blk.0.ffn_norm.weight": StoredTensor((8,), 0, 0),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(*tensors: str, **values: Any) -> Header:
    """Keys with dots are written with __."""
    named = {key.replace("__", "."): value for key, value in values.items()}
    stored = {name: StoredTensor((8,), 0, 0) for name in tensors}
    return Header(VALUES | named, {**TENSORS, **stored})


def test_numbers_texts_arrays_and_tensors_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    pairs = [
        pair("general.architecture", 8, text("qwen3")),
        pair("n", 9, struct.pack("<IQ3I", 4, 3, 1, 2, 3)),
        pair("t", 9, struct.pack("<IQ", 8, 2) + text("a") + text("bc")),
        pair("qwen3.block_count", 4, struct.pack("<I", 7)),
        pair("eps", 6, struct.pack("<f", 0.5)),
    ]
    tensors = b"".join(
        text(name) + struct.pack("<I2QIQ", 2, 4, 6, 12, at) for name, at in (("a", 0), ("b", 64))
    )
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2, len(pairs)) + b"".join(pairs) + tensors)
    found = read_header(path)
    assert found.architecture == "qwen3" and found.get("block_count") == 7
    assert found.values["n"] == [1, 2, 3] and found.values["t"] == ["a", "bc"]
    assert found.values["eps"] == 0.5
    assert found.tensors["a"].shape == (6, 4) and found.tensors["b"].kind == 12
    start = found.tensors["a"].start
    assert found.tensors["b"].start - start == 64 and start % 32 == 0


@pytest.mark.parametrize(
    "content",
    [
        b"GGUX" + bytes(40),
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 99, b""),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 8, struct.pack("<Q", 1 << 40)),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 9, struct.pack("<IQ", 4, 1 << 60)),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(90),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.gguf: not a readable GGUF file"):
        read_header(tmp_path / "a.gguf")


def test_a_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    count = pair("split.count", 2, struct.pack("<H", 2))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + count)
    with pytest.raises(UserError, match="a part of a split model; join it"):
        read_header(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (header(general__architecture="lama"), "'lama' is not supported .did you mean 'llama'"),
        (header(llama__block_count=0), "llama.block_count=0: must be a positive integer"),
        (header(llama__block_count=2), "says 2 layers of width 8, but has tensors of 1 layers"),
        (header(llama__rope__scaling__factor=4.0, llama__rope__scaling__type="yarn"), "type='?yarn'?: not supported"),
        (header("rope_factors_long.weight"), "rotary factors 'rope_factors_long.weight' are not supported"),
        (Header(VALUES, {"blk.0.a": StoredTensor((8,), 0, 0)}), "no tensor 'token_embd.weight' with a row for each"),
        (Header(VALUES, {**TENSORS, "a": StoredTensor((6, 8), 99, 0)}), "of unknown type 99"),
        (Header(VALUES, {**TENSORS, "a": StoredTensor((6, 8), 0, 1 << 30)}), "truncated: tensor 'a' ends at byte"),
    ],
)  # fmt: skip
def test_unconvertible_files_are_refused(given: Header, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_header(FILE, given)


def test_a_rotary_scale_may_have_its_older_key() -> None:
    assert rope_scale(header()) == 1 and rope_scale(header(llama__rope__scaling__factor=0.0)) == 1
    assert rope_scale(header(llama__rope__scaling__factor=4.0, llama__rope__scale_linear=2.0)) == 4
    assert rope_scale(header(llama__rope__scale_linear=2.0)) == 2
    none = {"llama__rope__scaling__factor": 4.0, "llama__rope__scaling__type": "none"}
    assert rope_scale(header(**none)) == 1


def test_a_gguf_is_recognised_by_its_bytes_and_found_in_a_folder(tmp_path: Path) -> None:
    write_gguf(tmp_path / "sha256-1.2.3", load_target("debug", fast=False))
    blob = (tmp_path / "sha256-1.2.3").read_bytes()
    assert is_gguf(tmp_path / "sha256-1.2.3") and is_gguf(tmp_path / "missing.GGUF")
    assert not is_gguf(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    assert gguf_of_folder(folder) is None
    (folder / "m.gguf").write_bytes(blob)
    (folder / "mmproj-m.gguf").write_bytes(blob)
    (folder / "config.json").write_text("{}")
    assert gguf_of_folder(folder) == folder / "m.gguf" and not is_hub_layout(folder)
    check_name(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    assert is_hub_layout(folder)
    (folder / "other.gguf").write_bytes(blob)
    with pytest.raises(UserError, match="choose one: m.gguf, other.gguf"):
        gguf_of_folder(folder)
