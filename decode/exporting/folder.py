"""Writing an export: a folder in hub layout with its card, complete or not there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from align.common.claims import Claim, remove_dead, scratch
from align.common.errors import UserError
from align.common.files import to_disk
from align.common.hub import card_value
from align.common.schema import read_object
from align.importing.layouts import RECORD
from align.models.block import BlockDrafter
from decode.exporting.formats import Exported
from decode.exporting.gguf_file import FILE, write_gguf
from decode.exporting.registry import FORMATS
from decode.method_names import EXPORTS

_UNFINISHED = ".specalign-export-"
"""How the name of a folder goes on that becomes an export."""


def check_free(out: Path) -> None:
    """Raises UserError where something else than an export, and nothing but it, stands in the folder's place."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UserError(f"--out={out}: is no folder")
    here = out.resolve()
    if here == Path.cwd() or here in Path.cwd().parents:
        raise UserError(f"--out={out}: holds the folder that you are in; name another one")
    if not out.is_dir():
        return
    record = read_object(out / RECORD) if (out / RECORD).is_file() else {}
    named = record.get("files")
    mine = {RECORD, *named} if isinstance(named, list) and record.get("format") in EXPORTS else set()
    if other := next((name for name in _files(out) if name not in mine), None):
        raise UserError(f"--out={out}: holds {other!r}, which no export wrote; name another folder")


def write_block(
    drafter: BlockDrafter,
    format_name: str,
    out: Path,
    dtype: torch.dtype,
    card: str,
    vocabulary: Path | None = None,
) -> Exported:
    """Write a block drafter's folder in a format of `FORMATS`; an export that stands there gives way when all is written.

    Args:
        vocabulary: the target's GGUF file, for the format `gguf`.

    Raises:
        UserError: what the format can't hold; a folder of something else.
    """
    check_free(out)
    made = FORMATS[format_name].make(drafter)
    record = {"format": format_name, "target": drafter.config.target}
    if format_name == "gguf":
        check_vocabulary(vocabulary)
        assert vocabulary is not None
        with scratch("specalign-gguf-") as aside:
            path = aside / FILE
            write_gguf(made, path, vocabulary, out.name, dtype)
            write_folder(out, record, {"README.md": card}, {}, [path])
        return made
    made.config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = {name: _stored(tensor, dtype) for name, tensor in made.tensors.items()}
    notes = "".join(f"- {note[0].upper()}{note[1:]}.\n" for note in made.notes)
    texts = {
        "config.json": json.dumps(made.config, indent=2) + "\n",
        "README.md": card + notes,
        **made.files,
    }
    write_folder(out, record, texts, tensors)
    return made


def check_vocabulary(path: Path | None) -> None:
    """Raises UserError where the target's GGUF file is not named, or is none."""
    if path is None:
        raise UserError(
            "--format gguf: name the target's own GGUF file, whose vocabulary it takes: --target-gguf FILE"
        )
    if not path.is_file():
        raise UserError(f"--target-gguf={path}: no such file")


def write_folder(
    out: Path,
    record: dict[str, str],
    texts: dict[str, str],
    tensors: dict[str, Tensor],
    others: Sequence[Path] = (),
) -> None:
    """All files at once, in the place of an export that stood there; whatever happens, one of both is there or aside under a name with
    a dot. `record`: what the export says of itself, beside its files."""
    check_free(out)
    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    kind = f".{out.name[:200]}{_UNFINISHED}"
    part = Path(tempfile.mkdtemp(prefix=kind, dir=out.parent))
    try:
        with Claim(part, "--out"):  # while it is held nobody takes it for a dead process's
            for path in others:
                shutil.copyfile(path, part / path.name)
            if tensors:
                save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
            for name, text in texts.items():
                (part / name).parent.mkdir(exist_ok=True)
                (part / name).write_text(text, encoding="utf-8")
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


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    wide = tensor.is_floating_point()
    return tensor.detach().to("cpu", dtype if wide else tensor.dtype).contiguous().clone()


def card_of(
    drafter_folder: Path, format_name: str, target: str, name: str, drafts: int, measured: list[str]
) -> str:
    """README.md: what it is, what serves it, what was measured. `measured`: lines of the drafter's own card."""
    python = format_name in ("transformers", "custom_generate")
    serve = "\n".join(f"    {line}" for line in FORMATS[format_name].serve(target, "FOLDER", drafts))
    return "\n".join(
        [
            "---",
            f"library_name: {'transformers' if python else 'vllm' if format_name != 'speculators' else 'speculators'}",
            f"base_model: {target}",
            f"license: {licence_of(drafter_folder)}",
            f"tags: [speculative-decoding, discrete-diffusion, drafter{', custom_generate' if format_name == 'custom_generate' else ''}]",
            "---",
            "",
            f"# {name}: drafts {drafts} tokens a pass for {target}",
            "",
            f"Format `{format_name}`. FOLDER is where this page lies:",
            "",
            serve,
            "",
            *(["| measured in training | |", "|---|---|", *measured, ""] if measured else []),
            "",
        ]
    )


def licence_of(folder: Path) -> str:
    """As the drafter's own card says it."""
    return card_value(folder, "license") or "other"


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
