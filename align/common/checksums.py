"""Checksums of a drafter's weights, in a file beside them that other loaders pass over."""

from __future__ import annotations

import json
from pathlib import Path

from align.common.errors import UserError
from align.common.files import sha256_file, write_atomically
from align.common.schema import convert, read_json

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path) -> None:
    """Of the weights in the folder."""
    files = sorted(folder.glob("*.safetensors"))
    text = json.dumps({path.name: sha256_file(path) for path in files}, indent=2) + "\n"
    write_atomically(folder / CHECKSUMS, lambda part: part.write_text(text))


def check_checksums(folder: Path) -> None:
    """Raises UserError where a file has changed since its checksum was written. Folders without checksums pass."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    for name, sha256 in convert(read_json(path), dict[str, str], "", str(path)).items():
        file = folder / Path(name).name
        if file.is_file() and sha256_file(file) != sha256:
            raise UserError(
                f"{file}: has changed since it was saved; fetch or train it again, or remove {CHECKSUMS} if that was you"
            )
