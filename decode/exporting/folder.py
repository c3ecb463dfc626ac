"""Write an export's folder: all files at once or nothing, never over files of somebody else."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from decode.exporting import EXPORTS
from decode.exporting.serving import Snippet
from specalign.common.claims import Claim, check_folder, remove_dead
from specalign.common.errors import UserError, nearest
from specalign.common.files import naming, to_disk
from specalign.common.hub import card_metadata, card_value
from specalign.common.schema import read_object
from specalign.common.text import markdown_text
from specalign.formats.kinds import EXPORT_RECORD


def check_free(out: Path, form: str) -> None:
    """Raises UserError unless `out` is free, or holds nothing but an export in the format
    `form`."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out={out}: not a folder")
    here, working = out.resolve(), Path.cwd()
    if here == working or here in working.parents:
        raise UserError(f"--out={out}: holds the current folder; name another one")
    check_folder(here.parent, f"--out={out}: folder")
    record = read_object(out / EXPORT_RECORD) if (out / EXPORT_RECORD).is_file() else {}
    written = record.get("files") if record.get("format") == form else None
    for name in _list_files(out):
        if not isinstance(written, list) or name not in (EXPORT_RECORD, *written):
            raise UserError(f"--out={out}: holds {name!r}, which no export to {form} wrote")


def write_folder(out: Path, record: dict[str, str], fill: Callable[[Path], None]) -> None:
    """Write an export next to its place, then move it there; an older export is replaced. `record`:
    format and target, for export.json; `fill`: writes all other files into a folder."""
    check_free(out, record["format"])
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name[:200]}.specalign-export-"
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    part = scratch / "new"
    try:
        with naming(out), Claim(scratch, "--out"):
            part.mkdir()
            fill(part)
            text = json.dumps({**record, "files": _list_files(part)}, indent=2) + "\n"
            (part / EXPORT_RECORD).write_text(text)
            for path in (*part.rglob("*"), part):
                to_disk(path)
            _replace(part, out, scratch / "old")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    remove_dead(out.parent, prefix)  # what killed exports left


def _list_files(folder: Path) -> list[str]:
    """Relative paths of all files, links and empty folders."""
    found = [
        p for p in folder.rglob("*") if p.is_symlink() or not p.is_dir() or not any(p.iterdir())
    ]
    return sorted(p.relative_to(folder).as_posix() for p in found)


def _replace(part: Path, out: Path, old: Path) -> None:
    """Move `part` to `out`; an older export is put back if that fails."""
    if out.is_dir():
        os.replace(out, old)
    try:
        os.replace(part, out)
    except BaseException:
        if old.is_dir():
            os.replace(old, out)
        raise
    to_disk(out.parent)


def read_format(folder: Path) -> str:
    """The format of an export. Raises UserError for any other folder."""
    if not (folder / EXPORT_RECORD).is_file():
        raise UserError(f"{folder}: no {EXPORT_RECORD}, so no export of this project")
    form = str(read_object(folder / EXPORT_RECORD).get("format"))
    if form not in EXPORTS:
        raise UserError(f"{folder}: is in the format {form!r}{nearest(form, EXPORTS)}")
    return form


def write_card(form: str, source: Path, target: str, name: str, serve: Sequence[Snippet]) -> str:
    """README.md: what it is, and lines that serve it; the licence is that of the drafter's own
    folder (`source`). `name`: of the export."""
    libraries = {"speculators": "speculators", "gguf": "llama.cpp"}
    libraries |= dict.fromkeys(("transformers", "custom_generate"), "transformers")
    tags = ("speculative-decoding", "discrete-diffusion", "drafter", form)
    licence = card_value(source, "license") or "other"
    page = card_metadata(libraries.get(form, "vllm"), target, licence, tags)
    page += [f"# {markdown_text(f'{name}: drafts for {target} ({form})')}", ""]
    for snippet in serve:
        page += [f"With {snippet.engine}:", "", f"```{snippet.language}", *snippet.lines, "```", ""]
    return "\n".join(page) + "\n"
