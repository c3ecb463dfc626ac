"""A GGUF file becomes the hub's model, once."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from specalign.common.checksums import CHECKSUMS
from specalign.common.errors import UserError
from specalign.common.files import UNFINISHED
from specalign.gguf.tokenizer import make_tokenizer
from specalign.lm.debug import debug_model
from specalign.lm.loading import load_target, resolve_folder
from specalign.lm.model import Target
from specalign.lm.names import ModelSource
from specalign.lm.proof import prove_target
from tests.target_models import needs_recent, piece_fields, tiny_model, write_gguf


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    return load_target("debug", fast=False)


def test_conversion(plain: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    loaded = load_target(str(path), dtype="float32", fast=False)
    assert "converting tiny.gguf (llama) once" in capsys.readouterr().err
    tokens = torch.arange(4, 30)[None]
    expected = plain.forward(tokens).logits_BLV
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)
    assert loaded.chat_tokens("Hello") == plain.chat_tokens("Hello") and loaded.eos_ids == (0, 2)
    load_target(str(path), dtype="float32", fast=False)
    assert "converting" not in capsys.readouterr().err


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_sentencepiece_untied_head_and_padded_vocabulary(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECALIGN_CACHE", str(tmp_path / "cache"))
    own = prove_target(
        tiny_model(architecture, 288), debug_model("Llama")[1], ModelSource(architecture)
    )
    write_gguf(tmp_path / "tiny.gguf", own, architecture, "llama")
    loaded = load_target(str(tmp_path / "tiny.gguf"), dtype="float32", fast=False)
    tokens = torch.arange(4, 280)[None]
    expected = own.forward(tokens).logits_BLV
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)
    assert loaded.eos_ids == (2,) and loaded.tokenizer.bos_token_id == 1
    text = "<s>the hello\n<think>  ab 😀</s>"
    assert loaded.tokenizer(text).input_ids == make_tokenizer(piece_fields())(text).input_ids


@pytest.mark.parametrize(("last", "scale"), [(8.0, None), (8.0, 4.0), (None, 4.0)])
def test_rotary(last: float | None, scale: float | None, plain: Target, tmp_path: Path) -> None:
    rotary: Any = plain.model.model.rotary_emb
    factors = torch.linspace(1.0, last or 1.0, len(rotary.inv_freq))
    write_gguf(tmp_path / "tiny.gguf", plain, frequencies=factors if last else None, scale=scale)
    rotary.inv_freq = rotary.inv_freq / factors / (scale or 1.0)
    tokens = torch.arange(4, 60)[None]
    loaded = load_target(str(tmp_path / "tiny.gguf"), dtype="float32", fast=False)
    expected = plain.model(tokens).logits
    torch.testing.assert_close(loaded.forward(tokens).logits_BLV, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("damage", ["flip", "missing", "no checksums"])
def test_a_changed_copy_is_converted_again(damage: str, plain: Target, tmp_path: Path) -> None:
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
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == good


@pytest.mark.slow
def test_a_killed_conversion_leaves_nothing_that_is_used(plain: Target, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    code = f"from specalign.lm.loading import resolve_folder; resolve_folder({str(path)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    targets = tmp_path / "cache" / "targets"
    while not list(targets.glob(f"*{UNFINISHED}")) and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not [p for p in targets.iterdir() if p.is_dir() and not p.name.endswith(UNFINISHED)]
    assert load_target(str(path), dtype="float32", fast=False).hash == plain.hash
    assert not list(targets.glob(f"*{UNFINISHED}"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 4_000_000_000),
        pytest.param("llama.attention.head_count", 8, marks=needs_recent),  # else when it is loaded
    ],
)
def test_contradicted_sizes_fail(key: str, value: int, plain: Target, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, plain)
    raw = bytearray(path.read_bytes())
    at = raw.index(key.encode()) + len(key) + 4
    raw[at : at + 4] = value.to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(UserError, match="tiny.gguf"):
        load_target(str(path))
    assert not [p for p in (tmp_path / "cache").glob("targets/*") if p.is_dir()]
