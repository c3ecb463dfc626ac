"""A GGUF file becomes the hub's model: rotary order, names, tokenizer; made once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from align.common.checksums import CHECKSUMS
from align.common.errors import UserError
from align.common.files import UNFINISHED
from align.gguf.header import read_header
from align.gguf.tokenizer import make_tokenizer
from align.target.debug import debug_model
from align.target.loading import load_target, resolve_folder
from align.target.model import Target
from align.target.proof import proven
from tests.target_models import piece_fields, tiny_model, write_gguf, write_out


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    return load_target("debug", fast=False)


def test_the_converted_model_is_the_model(plain: Target, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    folder = resolve_folder(str(path))
    assert isinstance(folder, Path)
    changed = (folder / "config.json").stat().st_mtime_ns
    loaded = load_target(str(path), dtype="float32", fast=False)
    tokens = torch.arange(4, 30)[None]
    expected = plain.forward(tokens).logits_BLV
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)
    assert loaded.chat_tokens("Hello") == plain.chat_tokens("Hello")
    assert resolve_folder(str(path)) == folder and (folder / "config.json").stat().st_mtime_ns == changed


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_sentencepiece_tokenizer_and_a_head_of_its_own(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 2, TinyLlama, Mistral; with more rows than tokens, as padded vocabularies have."""
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    own = proven(tiny_model(architecture, 288), debug_model("Llama")[1], architecture)
    write_gguf(tmp_path / "tiny.gguf", own, architecture, "llama")
    loaded = load_target(str(tmp_path / "tiny.gguf"), dtype="float32", fast=False)
    tokens = torch.arange(4, 280)[None]
    torch.testing.assert_close(
        loaded.forward(tokens).logits_BLV, own.forward(tokens).logits_BLV, atol=1e-5, rtol=1e-5
    )
    assert loaded.eos_ids == (2,) and loaded.tokenizer.bos_token_id == 1
    fields = piece_fields()
    text = "<s>the hello\n<think>  ab 😀</s>"
    assert loaded.tokenizer(text).input_ids == make_tokenizer(fields, Path("a"))(text).input_ids
    pieces = loaded.tokenizer.convert_ids_to_tokens(loaded.text_tokens("the hello"))
    assert pieces == ["<s>", "▁the", "▁", "hello"]


@pytest.mark.parametrize(("last", "scale"), [(8.0, None), (8.0, 4.0), (None, 4.0)])
def test_frequencies_of_their_own_are_those_of_the_model(
    last: float | None, scale: float | None, plain: Target, tmp_path: Path
) -> None:
    rotary: Any = plain.model.model.rotary_emb
    factors = torch.linspace(1.0, last or 1.0, len(rotary.inv_freq))
    write_gguf(tmp_path / "tiny.gguf", plain, frequencies=factors if last else None, scale=scale)
    rotary.inv_freq = rotary.inv_freq / factors / (scale or 1.0)
    tokens = torch.arange(4, 60)[None]
    loaded = load_target(str(tmp_path / "tiny.gguf"), dtype="float32", fast=False)
    expected = plain.model(tokens).logits
    assert not torch.allclose(load_target("debug", fast=False).model(tokens).logits, expected, atol=1e-4)
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("damage", ["flip", "missing", "unsealed"])
def test_a_copy_that_has_changed_is_made_again(
    damage: str, plain: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    folder = Path(resolve_folder(str(path)))
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    if damage == "flip":
        raw = bytearray(good["model.safetensors"])
        raw[-9] ^= 64
        (folder / "model.safetensors").write_bytes(raw)
    else:
        (folder / ("tokenizer.json" if damage == "missing" else CHECKSUMS)).unlink()
    assert resolve_folder(str(path)) == folder
    assert "is not what was converted from tiny.gguf; converting it again" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == good
    assert [other.name for other in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("architecture", "tokenizer", "says"),
    [
        ("lama", "gpt2", "GGUF architecture 'lama' is not supported .did you mean 'llama'"),
        ("llama", "bert", "GGUF tokenizer 'bert' is not supported"),
    ],
)
def test_what_is_not_supported_leaves_nothing(
    plain: Target, tmp_path: Path, architecture: str, tokenizer: str, says: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", plain, architecture, tokenizer)
    with pytest.raises(UserError, match=says):
        resolve_folder(str(tmp_path / "tiny.gguf"))
    assert not list((tmp_path / "cache").glob("targets/*"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 4_000_000_000),
        ("llama.embedding_length", 1 << 31),
        ("llama.feed_forward_length", 1 << 31),
        ("llama.attention.head_count", 1 << 30),
        ("llama.attention.head_count", 3),
        ("llama.attention.head_count", 8),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 1),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.head_count_kv", 0),
        ("llama.embedding_length", 32),
        ("llama.feed_forward_length", 32),
        ("llama.block_count", 1),
        ("llama.block_count", 9),
        ("llama.context_length", 0),
        ("tokenizer.ggml.eos_token_id", 5000),
        ("llama.context_length", 1 << 31),
    ],
)
def test_impossible_values_are_refused_before_anything_is_built(
    key: str, value: int, plain: Target, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    raw = bytearray(path.read_bytes())
    at = raw.index(key.encode()) + len(key) + 4
    raw[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UserError, match=rf"tiny\.gguf: .*{key}={value}\b"):
        load_target(str(path))
    assert not list((tmp_path / "cache").glob("targets/*"))


@pytest.mark.parametrize("inner", [4, 8])
def test_an_array_longer_than_the_file_is_refused(inner: int, plain: Target, tmp_path: Path) -> None:
    """Its reader would go on behind the end of the file."""
    path, key = tmp_path / "tiny.gguf", b"a"
    array = (9).to_bytes(4, "little") + inner.to_bytes(4, "little") + (1 << 60).to_bytes(8, "little")
    counts = (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    path.write_bytes(b"GGUF\x03\0\0\0" + counts + len(key).to_bytes(8, "little") + key + array)
    with pytest.raises(UserError, match="not a readable GGUF file .an array of 1152921504606846976 values"):
        resolve_folder(str(path))


def test_transformers_reader_gives_the_same_model_and_is_asked_once(
    plain: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What our own converter does not know goes through it; what both know comes out alike."""
    path, tokens = tmp_path / "tiny.gguf", torch.arange(4, 30)[None]
    write_gguf(path, plain)
    ours = load_target(str(path), dtype="float32", fast=False)
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "another"))
    monkeypatch.setattr("align.gguf.convert.OWN", ())
    theirs = load_target(str(path), dtype="float32", fast=False)
    assert "converting tiny.gguf (llama; F32 × 38) once" in capsys.readouterr().err
    torch.testing.assert_close(theirs.forward(tokens).logits_BLV, ours.forward(tokens).logits_BLV)
    assert theirs.chat_tokens("Hello") == ours.chat_tokens("Hello") and theirs.eos_ids == ours.eos_ids
    load_target(str(path), dtype="float32", fast=False)
    assert "converting" not in capsys.readouterr().err
    monkeypatch.setattr("align.gguf.convert._VERSION", 0)  # a copy that another version has made is not used
    load_target(str(path), dtype="float32", fast=False)
    assert "converting tiny.gguf" in capsys.readouterr().err


def test_what_killed_conversions_left_is_removed(plain: Target, tmp_path: Path) -> None:
    old, new = (tmp_path / "cache/targets" / f"{name}{UNFINISHED}" for name in ("old", "new"))
    for part in (old, new):
        part.mkdir(parents=True)
        (part / "model.safetensors").write_bytes(b"")
    for path in (old, old / "model.safetensors"):
        os.utime(path, (0, 0))
    write_gguf(tmp_path / "tiny.gguf", plain)
    resolve_folder(str(tmp_path / "tiny.gguf"))
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("damage", ["cut", "type"])
def test_a_file_cut_in_its_weights_or_of_an_unknown_type_is_refused_from_its_header(
    architecture: str, damage: str, plain: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain, architecture)
    raw = bytearray(path.read_bytes())
    name = b"blk.0.attn_q.weight"
    at = raw.index(name) + len(name) + 4 + 16
    raw[at : at + 4] = (99 if damage == "type" else 0).to_bytes(4, "little")
    path.write_bytes(raw if damage == "type" else raw[:-40])
    monkeypatch.delattr("align.gguf.convert._convert")
    monkeypatch.delattr("align.gguf.convert._convert_by_transformers")
    says = "is of type 99" if damage == "type" else r"would end at byte \d+, the file has \d+: it is cut off"
    with pytest.raises(UserError, match=says):
        resolve_folder(str(path))


@pytest.mark.parametrize("reader", ["ours", "transformers"])
@pytest.mark.parametrize(("add_bos", "opening"), [("true", [1]), ("false", [])])
def test_a_turns_end_and_bos_are_the_files(
    reader: str,
    add_bos: str,
    opening: list[int],
    plain: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chat file whose eos is the base model's, as `gguf-new-metadata` writes it: an answer ends as the unchanged file's does."""
    write_gguf(tmp_path / "tiny.gguf", plain)
    path, flags = tmp_path / "eot.gguf", ["--special-token", "eos", "<|endoftext|>"]
    script = Path(sys.executable).with_name("gguf-new-metadata")
    flags += ["--special-token", "eot", "<|im_end|>"]
    subprocess.run([script, *flags, tmp_path / "tiny.gguf", path], check=True, capture_output=True)
    assert read_header(path).values["tokenizer.ggml.eot_token_id"] == 2
    both = tmp_path / "both.gguf"
    copy_with(path, both, "tokenizer.ggml.add_bos_token", add_bos == "true")
    if reader == "transformers":
        monkeypatch.setattr("align.gguf.convert.OWN", ())
    for changed in (path, both):
        loaded = load_target(str(changed), dtype="float32", fast=False)
        assert loaded.eos_ids == (0, 2)
    assert loaded.text_tokens("Hi")[:-2] == opening
    assert loaded.tokenizer("Hi")["input_ids"] == loaded.text_tokens("Hi")


def copy_with(path: Path, out: Path, key: str, value: bool) -> None:
    """The file with another truth value in its metadata."""
    reader = gguf.GGUFReader(str(path))
    writer = gguf.GGUFWriter(str(out), "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    writer.add_bool(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, tensor.data.shape, tensor.tensor_type)
    write_out(writer)
