"""Which checkpoints of a run are whole, and which one to go on from.

A checkpoint is `step-N.ckpt` (a file, or a folder under DeepSpeed) with `step-N.json` beside it, written last.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from align.errors import UserError
from align.files import write_atomically


def place(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"step-{step}.ckpt"


def seal(path: Path, step: int, target_sha256: str) -> None:
    """Mark a checkpoint as complete."""
    size = path.stat().st_size if path.is_file() else None
    record = {"step": step, "target_sha256": target_sha256, "bytes": size}
    write_atomically(path.with_suffix(".json"), lambda part: part.write_text(json.dumps(record) + "\n"))


def _steps(folder: Path) -> list[tuple[int, Path]]:
    found = [
        (int(p.stem.removeprefix("step-")), p) for p in folder.glob("step-*.ckpt") if p.stem[5:].isdigit()
    ]
    return sorted(found, reverse=True)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints."""
    complete = [path for _, path in _steps(folder) if _fault(path) is None]
    for path in complete[keep:]:
        path.with_suffix(".json").unlink(
            missing_ok=True
        )  # unsealed first: a kill here leaves no half checkpoint
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fault(path: Path) -> str | None:
    """Why a checkpoint can't be used, or None."""
    try:
        record = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return "incomplete"
    if path.is_file() and path.stat().st_size != record.get("bytes"):
        return "torn"
    return None if path.exists() else "missing"


def newest(folder: Path, resume: str, target_sha256: str) -> Path | None:
    """The checkpoint that `trainer.resume` means: auto = the newest complete one or None, never = None, else a path.

    Raises:
        UserError: a named checkpoint that is not there or torn, or one of another target.
    """
    if resume == "never":
        return None
    if resume != "auto":
        path = Path(resume)
        if _fault(path):
            raise UserError(
                f"trainer.resume={resume}: no complete checkpoint there (auto, never, or a step-N.ckpt)"
            )
        return _of_target(path, target_sha256)
    for _, path in _steps(folder):
        fault = _fault(path)
        if fault is None:
            return _of_target(path, target_sha256)
        print(f"note: {path} is {fault} and left out", file=sys.stderr)
    return None


def _of_target(path: Path, target_sha256: str) -> Path:
    made_for = json.loads(path.with_suffix(".json").read_text())["target_sha256"]
    if made_for != target_sha256:
        raise UserError(
            f"{path}: trained towards another target (sha256 {made_for[:12]}…, not {target_sha256[:12]}…); "
            "use trainer.resume=never or another output"
        )
    return path
