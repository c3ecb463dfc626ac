"""An export is written whole, in the place of an export or of nothing."""

from __future__ import annotations

import json
import multiprocessing
import threading
from pathlib import Path

import pytest
import torch

from align.common.claims import Claim
from align.common.errors import UserError
from align.target.model import Target
from decode.exporting.registry import FORMATS
from tests.builders import block_network


def test_a_folder_of_something_else_stays(tmp_path: Path, target: Target) -> None:
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds 'mine.txt', which no export into this very folder wrote"):
        FORMATS["dflash"].write(drafter, tmp_path, torch.float32, "")
    FORMATS["dflash"].write(drafter, tmp_path / "out", torch.float32, "")
    FORMATS["dflash"].write(drafter, tmp_path / "out", torch.bfloat16, "")  # an export gives way to a new one
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(UserError, match="holds an export in the format 'dflash', which stays"):
        FORMATS["speculators"].write(drafter, tmp_path / "out", torch.bfloat16, "")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["format"] == "dflash"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_what_a_user_put_beside_an_export_stays(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, out = (
        block_network(target, "taps", whole=True, options={"block_layout": "fill_in"}),
        tmp_path / "out",
    )
    FORMATS["dflash"].write(drafter, out, torch.float32, "")
    monkeypatch.setattr("decode.exporting.folder.shutil.rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FORMATS["dflash"].write(drafter, out, torch.float32, "new")
    assert (out / "README.md").read_text().startswith("new")
    monkeypatch.undo()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds 'notes.txt'"):
        FORMATS["dflash"].write(drafter, out, torch.float32, "")
    other = tmp_path / "other"
    other.mkdir()
    (other / "export.json").write_text('{"results": [1]}')
    with pytest.raises(UserError, match="holds 'export.json'"):
        FORMATS["dflash"].write(drafter, other, torch.float32, "")
    (out / "notes.txt").unlink()
    monkeypatch.chdir(out)
    with pytest.raises(UserError, match="holds the folder that you are in"):
        FORMATS["dflash"].write(drafter, Path("."), torch.float32, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.exporting.folder._swap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        FORMATS["dflash"].write(drafter, out, torch.float32, "newer")
    assert (out / "README.md").read_text().startswith("new") and (out / "model.safetensors").is_file()


def test_what_a_killed_export_left_goes(tmp_path: Path, target: Target) -> None:
    """Its half folder and the old export that it had put aside, once a new one stands there; a live process's stay."""
    drafter = block_network(target, "taps", whole=True, options={"block_layout": "fill_in"})
    left = [tmp_path / f".out.specalign-export-x{end}" for end in ("", ".old")]
    live, other = tmp_path / ".out.specalign-export-y", tmp_path / ".other.specalign-export-x"
    for folder in (*left, live, other):
        folder.mkdir()
        (folder / "config.json").touch()
    process = multiprocessing.get_context("spawn").Process(target=hold, args=(live, tmp_path / "held"))
    process.start()
    try:
        while not (tmp_path / "held").exists():
            assert process.is_alive()
        FORMATS["dflash"].write(drafter, tmp_path / "out", torch.float32, "")
    finally:
        process.kill()
        process.join()
    assert {p.name for p in tmp_path.iterdir()} == {"out", live.name, other.name, "held"}


def hold(folder: Path, held: Path) -> None:
    with Claim(folder, "--out"):
        held.touch()
        threading.Event().wait()


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
