"""Complete checkpoints of a run, and the one to resume from.

A checkpoint is `step-N.ckpt` (a file, or a folder under DeepSpeed) with a seal `step-N.json`. It is
saved under another name, renamed when complete, and sealed last. The seal holds the run's settings
and the sizes and hashes of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError
from specalign.common.files import expand_path, sha256_file, to_disk, write_atomically
from specalign.common.schema import convert, read_object
from specalign.common.text import say

_START_OVER = "use trainer.resume=never or another output"
_SEAL_HASH = "seal_sha256"
"""The key of a seal's own hash, over all its other keys; seals before 0.5 have none."""


@dataclass(frozen=True)
class Settings:
    """What a run must share with the checkpoint that it resumes from. None = an older checkpoint
    does not know.

    train: the trained parts of the drafter. strategy: the kind that can read the checkpoint.
    follow: the order of the data. rates: the parts with their own learning rates.
    """

    stage: str | None = None
    train: str = "all"
    strategy: str | None = None
    follow: str = "false"
    rates: str = "none"


_OPTIONS = {
    "stage": "stage",
    "train": "drafter.train",
    "strategy": "launch.strategy",
    "follow": "data.follow",
    "rates": "trainer.learning_rates",
}
"""The option behind each setting."""


@dataclass(frozen=True)
class Seal(Settings):
    """The record of a complete checkpoint."""

    step: int = field(kw_only=True)
    seconds: float = field(kw_only=True)
    target_sha256: str = field(kw_only=True)
    drafter: dict[str, Any] = field(kw_only=True)
    draft_vocab: list[int] | None = field(kw_only=True)
    sizes: dict[str, int] = field(kw_only=True, default_factory=dict)
    sha256: dict[str, str] | None = None
    """Of each file; None in seals of older versions, as is the schedule."""
    schedule: dict[str, Any] | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint to resume from."""

    path: Path
    seal: Seal


def place(folder: Path, step: int) -> Path:
    """The path of a step's checkpoint."""
    return folder / f"step-{step}.ckpt"


def part(path: Path) -> Path:
    """The path of a checkpoint while it is being saved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def remove(path: Path) -> None:
    """Remove a checkpoint or a part of one, file or folder."""
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def seal(path: Path, record: Seal) -> None:
    """Rename a saved part to `path` and mark it as complete."""
    path.with_suffix(".json").unlink(missing_ok=True)
    remove(path)
    for file in _list_files(part(path)):
        to_disk(file)
    os.replace(part(path), path)
    hashes = {_relative_name(path, file): sha256_file(file) for file in _list_files(path)}
    values = asdict(replace(record, sizes=_measure(path), sha256=hashes))
    text = json.dumps({**values, _SEAL_HASH: _hash(values)}) + "\n"
    try:
        write_atomically(path.with_suffix(".json"), lambda file: file.write_text(text))
    except OSError:  # a full disk: an unsealed checkpoint is useless and takes space
        remove(path)
        raise


def read_seal(path: Path) -> Seal:
    """The seal of a checkpoint. Raises UserError if it is missing, broken or changed."""
    file = path.with_suffix(".json")
    values = read_object(file)
    recorded = values.pop(_SEAL_HASH, None)
    if recorded not in (None, _hash(values)):
        raise UserError(f"{file}: has changed since it was written")
    found: Seal = convert(values, Seal, "", str(file))
    return found


def _hash(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _list_files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _relative_name(path: Path, file: Path) -> str:
    return str(file.relative_to(path.parent))


def _measure(path: Path) -> dict[str, int]:
    return {_relative_name(path, file): file.stat().st_size for file in _list_files(path)}


def _list_steps(folder: Path) -> list[Path]:
    """Checkpoints, complete or not, newest first."""
    paths = [p for p in folder.glob("step-*.ckpt") if p.stem[5:].isdecimal()]
    return sorted(paths, key=lambda p: int(p.stem[5:]), reverse=True)


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next((path for path in _list_steps(folder) if find_fault(path) is None), None)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints."""
    complete = [path for path in _list_steps(folder) if find_fault(path) is None]
    for path in complete[keep:]:
        path.with_suffix(".json").unlink(missing_ok=True)  # first: a kill here leaves it unsealed
        remove(path)


def make_room(folder: Path, keep: int) -> None:
    """If the disk can't hold one more checkpoint, remove the oldest before saving, but never the
    only one."""
    size = max((sum(_measure(path).values()) for path in _list_steps(folder)), default=0)
    if size and keep > 1 and shutil.disk_usage(folder).free < size:
        prune(folder, keep - 1)


def clear_parts(folder: Path, keep: int | None = None) -> None:
    """Remove unsaved and unsealed remains of a killed run, and all but the newest `keep` complete
    checkpoints."""
    unsealed = [path for path in _list_steps(folder) if not path.with_suffix(".json").exists()]
    for path in (*folder.glob(".step-*.ckpt.part"), *unsealed):
        remove(path)
    if keep is not None:
        prune(folder, keep)


def set_aside(folder: Path) -> None:
    """Move an earlier run's checkpoints to `checkpoints.old`, so that `auto` never resumes from
    them."""
    if folder.is_dir() and any(folder.iterdir()):
        old = folder.with_name(f"{folder.name}.old")
        remove(old)
        os.replace(folder, old)


def find_fault(path: Path, read_content: bool = False) -> str | None:
    """Why a checkpoint is unusable, or None. `read_content` also compares the hashes of its
    files."""
    try:
        record = read_seal(path)
    except UserError:
        return "incomplete"
    if not path.exists():
        return "missing"
    if _measure(path) != record.sizes:
        return "torn"
    if read_content and record.sha256:
        for file in _list_files(path):
            name = _relative_name(path, file)
            if sha256_file(file) != record.sha256.get(name):
                return f"damaged ({name} has changed since it was saved)"
    return None


def check_named(resume: str, read_content: bool = False) -> None:
    """Raises UserError if `trainer.resume` names a checkpoint that is unusable."""
    if resume in ("auto", "never"):
        return
    if fault := find_fault(expand_path(resume, "trainer.resume"), read_content):
        raise UserError(
            f"trainer.resume={resume}: no complete checkpoint there ({fault}); auto, never, or a "
            "step-N.ckpt"
        )


def find_resume(folder: Path, resume: str, target_sha256: str) -> Checkpoint | None:
    """The checkpoint of `trainer.resume`: auto = the newest complete one if there is one, never =
    none, else a path.

    Raises:
        UserError: a named checkpoint that is unusable, or one of another target.
    """
    if resume == "never":
        return None
    check_named(resume, read_content=True)
    if resume != "auto":
        return _open(expand_path(resume, "trainer.resume"), target_sha256)
    for path in _list_steps(folder):
        fault = find_fault(path, read_content=True)
        if fault is None:
            return _open(path, target_sha256)
        say(f"warning: {path} is {fault} and ignored", error=True)
    return None


def _open(path: Path, target_sha256: str) -> Checkpoint:
    record = read_seal(path)
    if record.target_sha256 != target_sha256:
        raise UserError(
            f"{path}: trained towards another target (sha256 {record.target_sha256[:12]}…, not "
            f"{target_sha256[:12]}…); "
            f"{_START_OVER}"
        )
    return Checkpoint(path, record)


def check_same_run(checkpoint: Checkpoint, drafter: dict[str, Any], settings: Settings) -> None:
    """Raises UserError if a checkpoint's drafter has another architecture, or it was saved under
    other settings.

    Args:
        drafter: the config of this run's drafter.
    """
    path, record = checkpoint.path, checkpoint.seal
    saved = dict(record.drafter)
    if saved.get("markov") == "table":  # its former name
        saved["markov"] = "vanilla"
    # an option that an older version did not know was off
    added = {name: type(value)() for name, value in drafter.items() if name not in saved}
    for name, value in {**saved, **added}.items():
        if (
            name != "target" and drafter.get(name) != value
        ):  # the target's hash counts, not its place
            raise UserError(
                f"{path}: its drafter has {name}={value!r}, this recipe's {drafter.get(name)!r}; "
                f"{_START_OVER}"
            )
    for name, option in _OPTIONS.items():
        before = getattr(record, name)
        now = getattr(settings, name)
        if before not in (None, now):
            was = _describe(option, before)
            value = _describe(option, now).removeprefix(f"{option}=")
            raise UserError(f"{path}: saved under {was}, not {value}; give {was}, or {_START_OVER}")


def _describe(option: str, value: str) -> str:
    """A setting as an argument; `strategy on N processes` becomes two."""
    if option != "launch.strategy":
        return f"{option}={value}"
    strategy, separator, processes = value.partition(" on ")
    if separator:
        return f"{option}={strategy} with {processes} (launch.devices)"
    return f"{option}={value.replace('one file', 'auto')}"
