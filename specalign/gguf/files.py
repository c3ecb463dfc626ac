"""Finds GGUF files, and tells GGUF folders from hub-layout folders."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from specalign.common.errors import UserError

_WEIGHTS = re.compile(r".+\.safetensors|.+\.index\.json|pytorch_model.*\.bin")


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF: by its first four bytes, or by its suffix if it cannot be read."""
    named_gguf = path.suffix.lower() == ".gguf" and not path.is_dir()
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF" or named_gguf
    except OSError:
        return named_gguf


def gguf_of_folder(folder: Path) -> Path | None:
    """The GGUF model in a folder, None without one. Image projectors (`mmproj`) are skipped.

    Raises:
        UserError: the folder holds several models.
    """
    paths = sorted(p for p in folder.glob("*") if p.is_file() and _names_gguf_model(p.name))
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise UserError(f"{folder}: holds several GGUF models; name one of them: {names}")
    return paths[0] if paths else None


def is_hub_layout(folder: Path) -> bool:
    """Whether a folder is in hub layout: a config.json with weights, or without a GGUF file."""
    return names_hub_layout([path.name for path in folder.glob("*") if path.is_file()])


def names_hub_layout(names: Collection[str]) -> bool:
    """Whether files of these names make up a hub-layout folder."""
    has_weights = any(_WEIGHTS.fullmatch(name) for name in names)
    has_gguf = any(_names_gguf_model(name) for name in names)
    return "config.json" in names and (has_weights or not has_gguf)


def _names_gguf_model(name: str) -> bool:
    return name.lower().endswith(".gguf") and "mmproj" not in name.lower()
