"""Checkpoints hold weights only; torn ones and those of other runs say so."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.common.errors import UserError
from align.config.parser import load_recipe
from align.training.callbacks import CheckpointCallback
from align.training.checkpoints import (
    check_same_run,
    clear_parts,
    latest,
    make_room,
    newest,
    part,
    place,
    read_seal,
    remove,
    seal,
)
from align.training.parallel.strategies import SafeCheckpoints
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


def saved(folder: Path, step: int, size: int = 10) -> Path:
    path = place(folder, step)
    part(path).write_bytes(bytes(size))
    seal(path, {"step": step, "target_sha256": "0", "drafter": {}, "draft_vocab": None, "seconds": 0.0})
    return path


def test_a_seal_that_has_changed_is_none(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    file = path.with_suffix(".json")
    file.write_text(file.read_text().replace('"seconds": 0.0', '"seconds": 9.0'))
    assert newest(tmp_path, "auto", "0") == place(tmp_path, 1)
    assert "seal_sha256" not in read_seal(place(tmp_path, 1))
    record = read_seal(place(tmp_path, 1))
    file.write_text(json.dumps({**record, "sizes": {path.name: 10}, "sha256": {}}))  # a seal of old
    assert newest(tmp_path, "auto", "0") == path


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    saved(folder, 1)
    before = sorted(folder.iterdir())
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("align.training.checkpoints.write_atomically", full)
        saved(folder, 2)  # the seal has no room
    callback = CheckpointCallback(load_recipe(["recipe=debug_block", f"output={tmp_path}"]), {})

    def half(path: str) -> None:
        Path(path).write_bytes(b"half")
        full()

    with pytest.raises(OSError):
        callback._save(SimpleNamespace(global_step=3, is_global_zero=True, save_checkpoint=half), None)
    assert sorted(folder.iterdir()) == before


def test_what_a_kill_left_unsealed_goes_and_the_oldest_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    place(tmp_path, 3).with_suffix(".json").unlink()
    clear_parts(tmp_path)
    assert [place(tmp_path, step).exists() for step in (1, 2, 3)] == [True, True, False]
    saved(tmp_path, 3)
    clear_parts(tmp_path, keep=3)
    assert latest(tmp_path) == place(tmp_path, 3)
    remove(place(tmp_path, 3))
    make_room(tmp_path, 2)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9))
    make_room(tmp_path, 3)  # the third has to find room beside these
    assert place(tmp_path, 1).exists()
    make_room(tmp_path, 2)
    make_room(tmp_path, 1)
    assert [place(tmp_path, step).exists() for step in (1, 2)] == [False, True]


def test_a_checkpoint_is_written_where_it_belongs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by way of the folder of temporary files, where a kill leaves it."""
    monkeypatch.setattr("tempfile.mkstemp", full)
    SafeCheckpoints().save_checkpoint({"a": torch.ones(2)}, tmp_path / "x.ckpt")
    assert torch.equal(SafeCheckpoints().load_checkpoint(tmp_path / "x.ckpt")["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("saved", "now", "says"),
    [
        ("one file", "fsdp", "saved under launch.strategy=auto, not fsdp; give launch.strategy=auto, or use"),
        ("fsdp", "one file", "saved under launch.strategy=fsdp, not auto; give launch.strategy=fsdp, or use"),
        (
            "deepspeed_1 on 2 processes",
            "deepspeed_3 on 1 processes",
            r"saved under launch.strategy=deepspeed_1 with 2 processes \(launch.devices\), not deepspeed_3 with 1 processes",
        ),
    ],
)
def test_another_strategy_is_said_as_it_is_typed(
    monkeypatch: pytest.MonkeyPatch, saved: str, now: str, says: str
) -> None:
    monkeypatch.setattr(
        "align.training.checkpoints.read_seal", lambda path: {"drafter": {}, "strategy": saved}
    )
    with pytest.raises(UserError, match=says):
        check_same_run(Path("step-1.ckpt"), {}, {"stage": "calibrate", "train": "all", "strategy": now, "follow": "false", "rates": "none"})  # fmt: skip
