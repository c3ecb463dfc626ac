"""Finds GGUF files, and tells GGUF folders from hub-layout folders."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from specalign.common.errors import UserError

_WEIGHTS = re.compile(r".+\.safetensors|.+\.index\.json|pytorch_model.*\.bin")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_NAMES_SHOWN = 6


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
    paths = sorted(path for path in folder.glob("*") if _names_gguf_model(path.name))
    paths = [path for path in paths if path.is_file() and not _LATER_PART.search(path.stem)]
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths[:_NAMES_SHOWN])
        more = f", … ({len(paths)} in all)" if len(paths) > _NAMES_SHOWN else ""
        raise UserError(f"{folder}: holds several GGUF models; name one of them: {names}{more}")
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
