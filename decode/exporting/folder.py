"""What an export holds, and writing it: a folder with its card, complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from align.common.claims import Claim, check_folder, remove_dead
from align.common.errors import UserError
from align.common.files import naming, to_disk
from align.common.hub import card_metadata, card_value, hub_id
from align.common.schema import read_object
from align.common.text import markdown_text
from align.importing.layouts import RECORD
from decode.exporting import EXPORTS
from decode.exporting.serving import Snippet, card_blocks

EMBEDDING = "embed_tokens.weight"
"""A drafter's own rows for its input tokens; stored in fp32, because a scaled row has more digits than the target's."""
_UNFINISHED = ".specalign-export-"
"""How the name of a folder goes on that becomes an export."""


@dataclass
class Exported:
    """What a folder holds. notes: what a user must know of it, a sentence each; files: further ones, path in the folder → text."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def unnamed(target: str) -> list[str]:
    """What is to be said of a target that others don't find by its name, a sentence."""
    said = f"its target is {target!r}, which is no hub id: say which model that is, or export with --target OWNER/NAME"
    return [] if hub_id(target) else [said]


def bullets(notes: Iterable[str]) -> str:
    """Notes as a card shows them."""
    return "".join(f"- {markdown_text(note[0].upper() + note[1:])}.\n" for note in notes)


def python_text(text: str) -> str:
    """As Python source."""
    return json.dumps(text, ensure_ascii=False)


def check_free(out: Path, form: str) -> None:
    """Raises UserError where something else than an export in the format `form`, and nothing but it, stands in the folder's place, or
    none can be put there."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out={out}: is no folder")
    with naming(out):  # the folder that one is in may be gone
        here = out.resolve()
    if here == Path.cwd() or here in Path.cwd().parents:
        raise UserError(f"--out={out}: holds the folder that you are in; name another one")
    check_folder(here.parent, f"--out={out}: folder")
    if not out.is_dir():
        return
    record = read_object(out / RECORD) if (out / RECORD).is_file() else {}
    named, there = record.get("files"), record.get("format")
    mine = {RECORD, *named} if isinstance(named, list) and there in EXPORTS else set()
    if other := next((name for name in _files(out) if name not in mine), None):
        raise UserError(
            f"--out={out}: holds {other!r}, which no export into this very folder wrote; name another one"
        )
    if mine and there != form:
        raise UserError(
            f"--out={out}: holds an export in the format {there!r}, which stays; name another folder"
        )


def write_folder(out: Path, record: dict[str, str], card: str, fill: Callable[[Path], None]) -> None:
    """All files at once, in the place of an export that stood there; whatever happens, one of both is there or aside under a name with
    a dot. `record`: what the export says of itself, beside its files. `fill`: writes all but the card into the folder that it is given."""
    check_free(out, record["format"])
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    kind = f".{out.name[:200]}{_UNFINISHED}"
    part = Path(tempfile.mkdtemp(prefix=kind, dir=out.parent))
    try:
        with naming(out), Claim(part, "--out"):  # while it is held nobody takes it for a dead process's
            fill(part)
            (part / "README.md").write_text(card, encoding="utf-8")
        files = _files(part)
        (part / RECORD).write_text(json.dumps({**record, "files": files}, indent=2) + "\n")
        part.chmod(0o777 & ~_umask())
        for path in (*part.rglob("*"), part):
            to_disk(path)
        _swap(part, out)
        remove_dead(out.parent, kind)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _files(folder: Path) -> list[str]:
    """All in it by their place there; a folder without files and a link are named too."""
    found = [p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir())]
    return sorted(p.relative_to(folder).as_posix() for p in found)


def _swap(part: Path, out: Path) -> None:
    """The new folder in the old one's place; the old one goes when the new one stands there."""
    old = part.with_name(f"{part.name}.old")
    there = out.is_dir()
    try:
        if there:
            os.replace(out, old)
        os.replace(part, out)
        to_disk(out.parent)
    except BaseException:
        if old.is_dir() and not out.exists():
            os.replace(old, out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def card(
    source: Path,
    library: str,
    target: str,
    tags: Iterable[str],
    title: str,
    lead: str,
    serve: Sequence[Snippet],
) -> str:
    """README.md: what it is, lines that serve it, what was measured.

    Args:
        source: the drafter's own folder, whose card states licence and figures.
    """
    measured = measured_lines(source)
    return "\n".join(
        [
            *card_metadata(library, target, card_value(source, "license") or "other", tags),
            f"# {markdown_text(title)}",
            "",
            *([lead, ""] if lead else []),
            *card_blocks(serve),
            *(["| measured in training | |", "|---|---|", *measured, ""] if measured else []),
        ]
    )


def measured_lines(folder: Path) -> list[str]:
    """What the drafter's own card says was measured."""
    path = folder / "README.md"
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    return [line for line in lines if line.startswith(("| expected τ", "| acceptance "))]


def read_record(folder: Path) -> dict[str, Any]:
    """What an export says of itself. Raises UserError where the folder is none."""
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder}: no {RECORD}, so no export of this project")
    return dict(read_object(folder / RECORD))
