"""Checkpoints hold weights only; torn ones and those of other runs say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from align.common.errors import UserError
from align.training.checkpoints import newest
from tests.builders import train_debug_block as run


def test_checkpoint_loads_weights_only(tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data)
    state = torch.load(tmp_path / "checkpoints" / "step-12.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "calibrate"} <= state.keys()
    assert not any(
        "embed" in name or "lm_head" in name for name in state["state_dict"]
    )  # the target stays out
    assert {"ema", "rng", "identity"} <= state["calibrate"].keys()


def test_torn_and_foreign_checkpoints(
    tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, debug_data)
    folder = tmp_path / "checkpoints"
    sha = json.loads((folder / "step-12.json").read_text())["target_sha256"]
    whole = (folder / "step-12.ckpt").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (folder / "step-12.ckpt").write_bytes(flipped)
    assert newest(folder, "auto", sha) == folder / "step-6.ckpt"
    assert "step-12.ckpt is damaged (step-12.ckpt has changed" in capsys.readouterr().err
    with pytest.raises(UserError, match="damaged"):
        newest(folder, str(folder / "step-12.ckpt"), sha)
    (folder / "step-12.ckpt").write_bytes(b"torn")
    assert newest(folder, "auto", sha) == folder / "step-6.ckpt"
    assert "step-12.ckpt is torn" in capsys.readouterr().err
    assert newest(folder, "never", sha) is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        newest(folder, str(folder / "step-12.ckpt"), sha)
    with pytest.raises(UserError, match="another target"):
        newest(folder, "auto", "0" * 64)
    with pytest.raises(UserError, match="block_size"):
        run(tmp_path, debug_data, "drafter.block_size=2")
