"""Checkpoints hold only weights; damaged ones, and those of other runs, are refused or skipped."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.config.trainer import TrainerConfig
from align.training.callbacks import CheckpointCallback
from align.training.checkpoints import (
    Checkpoint,
    Seal,
    Settings,
    check_same_run,
    clear_parts,
    find_resume,
    latest,
    make_room,
    part,
    place,
    read_seal,
    remove,
    seal,
)
from align.training.parallel.strategies import SafeCheckpoints
from specalign.common.errors import UserError
from tests.builders import train_debug_block as run

SEAL = Seal(step=1, seconds=0.0, target_sha256="0", drafter={}, draft_vocab=None)


def newest(folder: Path, resume: str, sha: str) -> Path | None:
    found = find_resume(folder, resume, sha)
    return None if found is None else found.path


def test_checkpoint_loads_weights_only(tmp_path: Path, debug_data: Path) -> None:
    run(tmp_path, debug_data)
    state = torch.load(tmp_path / "checkpoints" / "step-12.ckpt", weights_only=True)
    assert {"state_dict", "optimizer_states", "calibrate"} <= state.keys()
    names = state["state_dict"]
    assert not any("embed" in name or "lm_head" in name for name in names)  # without the target
    assert {"ema", "rng", "identity"} <= state["calibrate"].keys()


def test_damaged_and_foreign_checkpoints(
    tmp_path: Path, debug_data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, debug_data)
    folder = tmp_path / "checkpoints"
    last = folder / "step-12.ckpt"
    sha = json.loads((folder / "step-12.json").read_text())["target_sha256"]
    flipped = bytearray(last.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    last.write_bytes(flipped)
    assert newest(folder, "auto", sha) == folder / "step-6.ckpt"
    assert "step-12.ckpt is damaged (step-12.ckpt has changed" in capsys.readouterr().err
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


def saved(folder: Path, step: int, size: int = 10) -> Path:
    path = place(folder, step)
    part(path).write_bytes(bytes(size))
    seal(path, replace(SEAL, step=step))
    return path


def test_a_changed_seal_is_invalid_and_an_older_one_is_read(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    path = saved(tmp_path, 2)
    file = path.with_suffix(".json")
    file.write_text(file.read_text().replace('"seconds": 0.0', '"seconds": 9.0'))
    assert newest(tmp_path, "auto", "0") == place(tmp_path, 1)
    needed = ("step", "seconds", "target_sha256", "drafter", "draft_vocab")
    record = {name: value for name, value in asdict(SEAL).items() if name in needed}
    file.write_text(json.dumps({**record, "sizes": {path.name: 10}}))
    assert newest(tmp_path, "auto", "0") == path and read_seal(path).train == "all"


def full(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 1)
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch, pytest.raises(OSError):
        patch.setattr("align.training.checkpoints.write_atomically", full)
        saved(tmp_path, 2)  # no room for the seal
    callback = CheckpointCallback(TrainerConfig(), tmp_path, Settings())

    def half(path: str) -> None:
        Path(path).write_bytes(b"half")
        full()

    with pytest.raises(OSError):
        callback._save(
            SimpleNamespace(global_step=3, is_global_zero=True, save_checkpoint=half), None
        )  # type: ignore[arg-type]
    assert sorted(tmp_path.iterdir()) == before


def test_remains_of_a_kill_are_removed_and_the_oldest_makes_room(
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
    make_room(tmp_path, 3)
    assert place(tmp_path, 1).exists()
    make_room(tmp_path, 2)
    make_room(tmp_path, 1)
    assert [place(tmp_path, step).exists() for step in (1, 2)] == [False, True]


def test_a_checkpoint_is_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not through the temporary folder, where a kill leaves it."""
    monkeypatch.setattr("tempfile.mkstemp", full)
    SafeCheckpoints().save_checkpoint({"a": torch.ones(2)}, tmp_path / "x.ckpt")
    assert torch.equal(SafeCheckpoints().load_checkpoint(tmp_path / "x.ckpt")["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            "one file",
            "fsdp",
            "saved under launch.strategy=auto, not fsdp; give launch.strategy=auto, or use",
        ),
        (
            "deepspeed_1 on 2 processes",
            "deepspeed_3 on 1 processes",
            r"saved under launch.strategy=deepspeed_1 with 2 processes \(launch.devices\), not deepspeed_3 with 1 processes",
        ),
    ],
)
def test_another_strategy(before: str, now: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_same_run(
            Checkpoint(Path("step-1.ckpt"), replace(SEAL, strategy=before)),
            {},
            Settings(strategy=now),
        )
