"""Checkpoints hold only weights; damaged ones, and those of other runs, are refused or skipped."""

import errno
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from align.config.recipe import Recipe
from align.training import checkpoints
from align.training.callbacks import CheckpointCallback
from align.training.checkpoints import Checkpoint, Seal, check_same_run, part, place, seal
from specalign.common.errors import UserError
from tests.builders import train_debug_block as run

SEAL = Seal(step=1, seconds=0.0, target_sha256="0", drafter={}, draft_vocab=None)


def newest(folder: Path, resume: str, sha: str) -> Path | None:
    found = checkpoints.find_resume(folder, resume, sha)
    return None if found is None else found.path


def test_bad_files(tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, debug_data)
    folder = tmp_path / "checkpoints"
    last = folder / "step-12.ckpt"
    sha = json.loads((folder / "step-12.json").read_text())["target_sha256"]
    flipped = bytearray(last.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    last.write_bytes(flipped)
    assert newest(folder, "auto", sha) == folder / "step-6.ckpt"
    assert "step-12.ckpt: damaged (step-12.ckpt has changed" in capsys.readouterr().err
    with pytest.raises(UserError, match="damaged"):
        newest(folder, str(last), sha)
    last.write_bytes(b"torn")
    assert newest(folder, "auto", sha) == folder / "step-6.ckpt"
    assert newest(folder, "never", sha) is None
    with pytest.raises(UserError, match="no complete checkpoint"):
        newest(folder, str(last), sha)
    with pytest.raises(UserError, match="another target"):
        newest(folder, "auto", "0" * 64)
    with pytest.raises(UserError, match="block_size"):
        run(tmp_path, debug_data, "drafter.block_size=2")


def saved(folder: Path, step: int) -> Path:
    path = place(folder, step)
    part(path).write_bytes(bytes(10))
    seal(path, replace(SEAL, step=step))
    return path


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disks_leave_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("align.training.checkpoints.write_text", full)
        saved(tmp_path, 2)  # no room for the seal
    module: Any = SimpleNamespace(recipe=Recipe(output=str(tmp_path)))
    callback = CheckpointCallback(module)
    callback.folder = tmp_path

    def half(path: str) -> None:
        Path(path).write_bytes(b"half")
        full()

    trainer = SimpleNamespace(global_step=3, is_global_zero=True, save_checkpoint=half)
    with pytest.raises(OSError):
        callback._save(trainer)  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before


def test_remains_of_a_kill_are_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    place(tmp_path, 3).with_suffix(".json").unlink()
    part(place(tmp_path, 4)).write_bytes(b"half")
    checkpoints.clear_parts(tmp_path)
    checkpoints.prune(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-2.ckpt", "step-2.json"}


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ({"strategy": "one file"}, "saved with launch.strategy=one file, not fsdp; use"),
        ({"stage": "pretrain"}, "saved with stage=pretrain, not calibrate; use"),
        ({"schedule": {"batch_size": 9}}, "saved with trainer.batch_size=9, not 2; use"),
        ({"step": 1001}, "trainer.max_steps=1000: step-1.ckpt already has 1001 steps"),
    ],
)
def test_other_settings_are_refused(before: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint = Checkpoint(Path("step-1.ckpt"), replace(SEAL, **before))
        check_same_run(checkpoint, Recipe(), {}, "fsdp")
