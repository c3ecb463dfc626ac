"""GGUF headers: which files are refused before they are converted."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specalign.common.errors import UserError
from specalign.gguf.header import (
    Header,
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
TENSORS: dict[str, Any] = {
    "token_embd.weight": SimpleNamespace(shape=(8, 6)),
    "blk.0.ffn_norm.weight": SimpleNamespace(shape=(8,)),
}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def header(*tensors: str, **values: Any) -> Header:
    """Keys with dots are written with __."""
    named = {key.replace("__", "."): value for key, value in values.items()}
    stored = dict.fromkeys(tensors, TENSORS["blk.0.ffn_norm.weight"])
    return Header(VALUES | named, {**TENSORS, **stored})


@pytest.mark.parametrize(
    "content",
    [
        b"GGUX" + bytes(40),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 99, b""),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("x", 9, struct.pack("<IQ", 4, 1 << 60)),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("w") + struct.pack("<I", 1 << 31) + bytes(90),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.gguf: not a readable GGUF file"):
        read_header(tmp_path / "a.gguf")


def test_a_truncated_download_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", load_target("debug", fast=False))
    content = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content[:-40])
    with pytest.raises(UserError, match=f"truncated: it ends after {len(content) - 40} bytes"):
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
        (Header(VALUES, {}), "no tensor 'token_embd.weight' with a row for each"),
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
