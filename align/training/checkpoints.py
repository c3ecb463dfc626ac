"""Which checkpoints of a run are whole, and which one to go on from.

A checkpoint is `step-N.ckpt` (a file, or a folder under DeepSpeed) with its seal `step-N.json` beside it. It is saved
under another name, renamed when it is whole, and sealed last; the seal says what it belongs to and how large it is.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from align.common.errors import UserError
from align.common.files import write_atomically

_ANEW = "use trainer.resume=never or another output"


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return folder / f"step-{step}.ckpt"


def part(path: Path) -> Path:
    """The name that a checkpoint bears while it is being saved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def remove(path: Path) -> None:
    """Remove a checkpoint or a part of one, file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def seal(path: Path, record: dict[str, Any]) -> None:
    """Give a saved part its name and mark it as complete. `record`: step, target_sha256, drafter, draft_vocab, seconds."""
    path.with_suffix(".json").unlink(missing_ok=True)
    remove(path)
    os.replace(part(path), path)
    text = json.dumps({**record, "sizes": _sizes(path)}) + "\n"
    write_atomically(path.with_suffix(".json"), lambda file: file.write_text(text))


def read_seal(path: Path) -> dict[str, Any]:
    """The record of a complete checkpoint."""
    return json.loads(path.with_suffix(".json").read_text())


def _sizes(path: Path) -> dict[str, int]:
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(p.relative_to(path.parent)): p.stat().st_size for p in files}


def _steps(folder: Path) -> list[Path]:
    found = [
        (int(p.stem.removeprefix("step-")), p) for p in folder.glob("step-*.ckpt") if p.stem[5:].isdigit()
    ]
    return [p for _, p in sorted(found, reverse=True)]


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints."""
    complete = [path for path in _steps(folder) if fault(path) is None]
    for path in complete[keep:]:
        path.with_suffix(".json").unlink(
            missing_ok=True
        )  # unsealed first: a kill here leaves no half checkpoint
        remove(path)


def set_aside(folder: Path) -> None:
    """Start anew: an earlier run's checkpoints go to `checkpoints.old`, so that `auto` never takes up one of them."""
    if folder.is_dir() and any(folder.iterdir()):
        old = folder.with_name(f"{folder.name}.old")
        remove(old)
        os.replace(folder, old)


def fault(path: Path) -> str | None:
    """Why a checkpoint can't be used, or None."""
    try:
        record = read_seal(path)
        sizes = record["sizes"]
        int(record["step"]), record["target_sha256"], record["drafter"]
    except (OSError, ValueError, KeyError, TypeError):
        return "incomplete"
    if not path.exists():
        return "missing"
    return None if _sizes(path) == sizes else "torn"


def check_named(resume: str) -> None:
    """Raises UserError where `trainer.resume` names a checkpoint that is not there or torn."""
    if resume in ("auto", "never"):
        return
    if why := fault(Path(resume).expanduser()):
        raise UserError(
            f"trainer.resume={resume}: no complete checkpoint there ({why}); auto, never, or a step-N.ckpt"
        )


def newest(folder: Path, resume: str, target_sha256: str) -> Path | None:
    """The checkpoint that `trainer.resume` means: auto = the newest complete one or None, never = None, else a path.

    Raises:
        UserError: a named checkpoint that is not there or torn, or one of another target.
    """
    check_named(resume)
    if resume == "never":
        return None
    if resume != "auto":
        return _of_target(Path(resume).expanduser(), target_sha256)
    for path in _steps(folder):
        why = fault(path)
        if why is None:
            return _of_target(path, target_sha256)
        print(f"warning: {path} is {why} and left out", file=sys.stderr)
    return None


def _of_target(path: Path, target_sha256: str) -> Path:
    made_for = str(read_seal(path)["target_sha256"])
    if made_for != target_sha256:
        raise UserError(
            f"{path}: trained towards another target (sha256 {made_for[:12]}…, not {target_sha256[:12]}…); {_ANEW}"
        )
    return path


_SETTINGS = {"stage": "stage", "train": "drafter.train", "strategy": "launch.strategy"}


def check_same_run(path: Path, drafter: dict[str, Any], settings: dict[str, str]) -> None:
    """Raises UserError when a checkpoint's drafter has another architecture, or it was saved under other `settings`: stage,
    train (the parts of the drafter that are trained), strategy (the kind that can read it)."""
    record = read_seal(path)
    # what an older version did not write down was not there then: off, none of it
    added = {name: type(value)() for name, value in drafter.items() if name not in record["drafter"]}
    for name, value in {**record["drafter"], **added}.items():
        if (
            drafter.get(name) != value and name != "target"
        ):  # where the target was found does not matter, its hash does
            raise UserError(
                f"{path}: its drafter has {name}={value!r}, this recipe's {drafter.get(name)!r}; {_ANEW}"
            )
    record = {"train": "all", **record}
    for key, name in _SETTINGS.items():
        if (before := record.get(key, settings[key])) != settings[key]:
            raise UserError(
                f"{path}: saved under {name}={before}, not {settings[key]}; give {name}={before}, or {_ANEW}"
            )
