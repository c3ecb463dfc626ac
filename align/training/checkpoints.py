"""Which checkpoints of a run are whole, and which one to go on from.

A checkpoint is `step-N.ckpt` (a file, or a folder under DeepSpeed) with its seal `step-N.json` beside it. It is saved
under another name, renamed when it is whole, and sealed last; the seal says what it belongs to, how large its files are
and what they hash to.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, TypedDict

from align.common.errors import UserError
from align.common.files import expand_path, sha256_file, to_disk, write_atomically
from align.common.schema import convert, read_object
from align.common.text import say

_ANEW = "use trainer.resume=never or another output"


_OWN = "seal_sha256"
"""The key of a seal's own hash, over all its other keys."""


class _Always(TypedDict):
    step: int
    target_sha256: str
    drafter: dict[str, Any]
    draft_vocab: list[int] | None
    seconds: float
    sizes: dict[str, int]


class Seal(_Always, total=False):
    """What a seal holds that is read."""

    sha256: dict[str, str]
    """Of each file; a seal of old has none."""
    stage: str
    train: str
    strategy: str
    follow: str
    rates: str
    schedule: dict[str, Any]


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
    for file in _files(part(path)):
        to_disk(file)
    os.replace(part(path), path)
    hashes = {_name(path, file): sha256_file(file) for file in _files(path)}
    record = {**record, "sizes": _sizes(path), "sha256": hashes}
    text = json.dumps({**record, _OWN: _hash(record)}) + "\n"
    try:
        write_atomically(path.with_suffix(".json"), lambda file: file.write_text(text))
    except OSError:  # a full disk: without its seal it is of no use and takes what is left
        remove(path)
        raise


def read_seal(path: Path) -> dict[str, Any]:
    """The record of a complete checkpoint. Raises UserError for one that is broken or not as it was written."""
    file = path.with_suffix(".json")
    record = read_object(file)
    own = record.pop(_OWN, None)
    if own is not None and own != _hash(record):  # a seal of old has none
        raise UserError(f"{file}: has changed since it was written")
    return convert(record, Seal, "", str(file))


def _hash(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _name(path: Path, file: Path) -> str:
    return str(file.relative_to(path.parent))


def _sizes(path: Path) -> dict[str, int]:
    return {_name(path, file): file.stat().st_size for file in _files(path)}


def _steps(folder: Path) -> list[Path]:
    found = [
        (int(p.stem.removeprefix("step-")), p) for p in folder.glob("step-*.ckpt") if p.stem[5:].isdecimal()
    ]
    return [p for _, p in sorted(found, reverse=True)]


def latest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next((path for path in _steps(folder) if fault(path) is None), None)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` complete checkpoints."""
    complete = [path for path in _steps(folder) if fault(path) is None]
    for path in complete[keep:]:
        path.with_suffix(".json").unlink(
            missing_ok=True
        )  # unsealed first: a kill here leaves no half checkpoint
        remove(path)


def make_room(folder: Path, keep: int) -> None:
    """Where the disk can't hold one checkpoint more, remove at once the one that would go after it; never the only one."""
    size = max((sum(_sizes(path).values()) for path in _steps(folder)), default=0)
    if size and keep > 1 and shutil.disk_usage(folder).free < size:  # only then is every checkpoint read
        prune(folder, keep - 1)


def clear_parts(folder: Path, keep: int | None = None) -> None:
    """Remove what a killed or failed run left half saved, or saved and not sealed; and all but the newest `keep`."""
    unsealed = [path for path in _steps(folder) if not path.with_suffix(".json").exists()]
    for left in (*folder.glob(".step-*.ckpt.part"), *unsealed):
        remove(left)
    if keep is not None:
        prune(folder, keep)


def set_aside(folder: Path) -> None:
    """Start anew: an earlier run's checkpoints go to `checkpoints.old`, so that `auto` never takes up one of them."""
    if folder.is_dir() and any(folder.iterdir()):
        old = folder.with_name(f"{folder.name}.old")
        remove(old)
        os.replace(folder, old)


def fault(path: Path) -> str | None:
    """Why a checkpoint can't be used, or None."""
    try:
        sizes = read_seal(path)["sizes"]
    except UserError:
        return "incomplete"
    if not path.exists():
        return "missing"
    return None if _sizes(path) == sizes else "torn"


def _damage(path: Path) -> str | None:
    """`fault`, and whether every file still has the content that was sealed; seals of old had no hashes."""
    if why := fault(path):
        return why
    hashes = read_seal(path).get("sha256")
    files = {_name(path, file): file for file in _files(path)} if hashes else {}
    changed = [name for name, file in files.items() if sha256_file(file) != (hashes or {}).get(name)]
    return f"damaged ({changed[0]} has changed since it was saved)" if changed else None


def check_named(resume: str) -> None:
    """Raises UserError where `trainer.resume` names a checkpoint that is not there or torn."""
    if resume in ("auto", "never"):
        return
    if why := fault(expand_path(resume, "trainer.resume")):
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
        named = expand_path(resume, "trainer.resume")
        if why := _damage(named):
            raise UserError(f"trainer.resume={resume}: {why}; auto, never, or another step-N.ckpt")
        return _of_target(named, target_sha256)
    for path in _steps(folder):
        why = _damage(path)
        if why is None:
            return _of_target(path, target_sha256)
        say(f"warning: {path} is {why} and left out", error=True)
    return None


def _of_target(path: Path, target_sha256: str) -> Path:
    made_for = str(read_seal(path)["target_sha256"])
    if made_for != target_sha256:
        raise UserError(
            f"{path}: trained towards another target (sha256 {made_for[:12]}…, not {target_sha256[:12]}…); {_ANEW}"
        )
    return path


_SETTINGS = {
    "stage": "stage",
    "train": "drafter.train",
    "strategy": "launch.strategy",
    "follow": "data.follow",
    "rates": "trainer.learning_rates",
}


def check_same_run(path: Path, drafter: dict[str, Any], settings: dict[str, str]) -> None:
    """Raises UserError when a checkpoint's drafter has another architecture, or it was saved under other `settings`: stage,
    train (the parts of the drafter that are trained), strategy (the kind that can read it), follow (the order of the data), rates
    (which parts have learning rates of their own)."""
    record = read_seal(path)
    saved = dict(record["drafter"])
    if saved.get("markov") == "table":  # its name of old
        saved["markov"] = "vanilla"
    # what an older version did not write down was not there then: off, none of it
    added = {name: type(value)() for name, value in drafter.items() if name not in saved}
    for name, value in {**saved, **added}.items():
        if (
            drafter.get(name) != value and name != "target"
        ):  # where the target was found does not matter, its hash does
            raise UserError(
                f"{path}: its drafter has {name}={value!r}, this recipe's {drafter.get(name)!r}; {_ANEW}"
            )
    record = {"train": "all", "follow": "false", "rates": "none", **record}
    for key, name in _SETTINGS.items():
        if (before := record.get(key, settings[key])) != settings[key]:
            was, now = _typed(name, before), _typed(name, settings[key])
            raise UserError(
                f"{path}: saved under {was}, not {now.removeprefix(name + '=')}; give {was}, or {_ANEW}"
            )


def _typed(name: str, value: str) -> str:
    """A setting as it is given; of a strategy, whose kinds of checkpoints have names of their own, the words for it."""
    if name != "launch.strategy":
        return f"{name}={value}"
    strategy, on, processes = value.partition(" on ")
    return (
        f"{name}={strategy} with {processes} (launch.devices)"
        if on
        else f"{name}={value.replace('one file', 'auto')}"
    )
