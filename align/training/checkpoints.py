"""Complete checkpoints of a run, and the one to resume from.

A checkpoint is `step-N.ckpt` (a file, or a folder under DeepSpeed), renamed when complete, with a
seal `step-N.json`, written last, of the run's settings and the hashes of the files.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from align.config.recipe import Recipe
from specalign.common.errors import UserError
from specalign.common.files import expand_path, sha256_file, to_disk, write_text
from specalign.common.schema import JsonObject, convert, read_object
from specalign.common.text import say

_START_OVER = "use trainer.resume=never or another output"


@dataclass(frozen=True, kw_only=True)
class Seal:
    """The record of a complete checkpoint. train: `drafter.train`. strategy: the kind of strategy
    that can read it. sha256: of each file. schedule: batch size, and rows of other text."""

    stage: str | None = None
    train: str = "all"
    strategy: str | None = None
    step: int
    seconds: float
    target_sha256: str
    drafter: JsonObject
    draft_vocab: list[int] | None
    sha256: dict[str, str] = field(default_factory=dict)
    schedule: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint to resume from."""

    path: Path
    seal: Seal


def place(folder: Path, step: int) -> Path:
    return folder / f"step-{step}.ckpt"


def part(path: Path) -> Path:
    """The path of a checkpoint while it is being saved."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_name(f".{path.name}.part")


def remove(path: Path) -> None:
    """Remove a checkpoint or a part of one, file or folder; its seal first."""
    path.with_suffix(".json").unlink(missing_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def seal(path: Path, record: Seal) -> None:
    """Rename a saved part to `path` and mark it as complete."""
    remove(path)
    for file in _list_files(part(path)).values():
        to_disk(file)
    os.replace(part(path), path)
    hashes = {name: sha256_file(file) for name, file in _list_files(path).items()}
    try:
        text = json.dumps(asdict(replace(record, sha256=hashes))) + "\n"
        write_text(path.with_suffix(".json"), text)
    except OSError:  # a full disk: an unsealed checkpoint is useless and takes space
        remove(path)
        raise


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints."""
    sealed = [path for path in _list_steps(folder) if path.with_suffix(".json").exists()]
    for path in sealed[keep:]:
        remove(path)


def clear_parts(folder: Path) -> None:
    """Remove unsaved and unsealed remains of a killed run."""
    unsealed = [path for path in _list_steps(folder) if not path.with_suffix(".json").exists()]
    for path in (*folder.glob(".step-*.ckpt.part"), *unsealed):
        remove(path)


def set_aside(folder: Path) -> None:
    """Move an earlier run's checkpoints to `checkpoints.old`, so that `auto` never resumes from
    them."""
    if folder.is_dir() and any(folder.iterdir()):
        old = folder.with_name(f"{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(folder, old)


def _list_files(path: Path) -> dict[str, Path]:
    """The files of a checkpoint by their names in its seal."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return {str(file.relative_to(path.parent)): file for file in files}


def _list_steps(folder: Path) -> list[Path]:
    """Checkpoints, complete or not, newest first."""
    paths = [p for p in folder.glob("step-*.ckpt") if p.stem[5:].isdecimal()]
    return sorted(paths, key=lambda p: int(p.stem[5:]), reverse=True)


def read_seal(path: Path) -> Seal:
    """The seal of a checkpoint. Raises UserError if it is missing or broken."""
    file = path.with_suffix(".json")
    found: Seal = convert(read_object(file), Seal, "", str(file))
    return found


def find_fault(path: Path) -> str | None:
    """Why a checkpoint is unusable, or None."""
    try:
        hashes = read_seal(path).sha256
    except UserError:
        return "incomplete"
    files = _list_files(path)
    if not files or files.keys() != hashes.keys():
        return "incomplete"
    for name, file in files.items():
        if sha256_file(file) != hashes[name]:
            return f"damaged ({name} has changed since it was saved)"
    return None


def find_resume(folder: Path, resume: str, target_sha256: str) -> Checkpoint | None:
    """The checkpoint of `trainer.resume`: auto = the newest complete one if there is one, never =
    none, else a path. Raises UserError: a named one that is unusable, or one of another target."""
    if resume == "never":
        return None
    is_named = resume != "auto"
    for path in [expand_path(resume, "trainer.resume")] if is_named else _list_steps(folder):
        fault = find_fault(path)
        if fault and is_named:
            hint = "auto, never, or a step-N.ckpt"
            raise UserError(f"trainer.resume={resume}: no complete checkpoint ({fault}); {hint}")
        if fault:
            say(f"warning: ignoring {path}: {fault}", error=True)
            continue
        found = read_seal(path)
        if found.target_sha256 != target_sha256:
            raise UserError(
                f"{path}: trained for another target (sha256 {found.target_sha256[:12]}…, not "
                f"{target_sha256[:12]}…); {_START_OVER}"
            )
        return Checkpoint(path, found)
    return None


def check_same_run(
    checkpoint: Checkpoint, recipe: Recipe, drafter: JsonObject, strategy: str
) -> None:
    """Raises UserError if a checkpoint's drafter has another config than `drafter`, it was saved
    under other settings, or comes after the recipe's last step."""
    path, record = checkpoint.path, checkpoint.seal
    for name in {**record.drafter, **drafter}:
        now, saved = drafter.get(name), record.drafter.get(name)
        is_new = name not in record.drafter and not now  # an option of a later version
        if name != "target" and saved != now and not is_new:  # the target's hash counts
            raise UserError(
                f"{path}: its drafter has {name}={saved!r}, this recipe's {now!r}; {_START_OVER}"
            )
    batch_size = record.schedule.get("batch_size")
    for option, saved, now in (
        ("stage", record.stage, recipe.stage),
        ("drafter.train", record.train, recipe.drafter.train),
        ("launch.strategy", record.strategy, strategy),
        ("trainer.batch_size", batch_size, recipe.trainer.batch_size),
    ):
        if saved not in (None, now):
            raise UserError(f"{path}: saved with {option}={saved}, not {now}; {_START_OVER}")
    if record.step > recipe.trainer.max_steps:
        limit = f"trainer.max_steps={recipe.trainer.max_steps}"
        raise UserError(f"{limit}: {path} already has {record.step} steps")
