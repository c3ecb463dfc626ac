"""Checksums of a drafter's weights, and of all files of a folder that was made by ourselves, in a
file next to them that other loaders pass over."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specalign.common.errors import UserError
from specalign.common.files import check_ordinary, sha256_file, write_json
from specalign.common.schema import convert, read_json

CHECKSUMS = "checksums.json"


def write_checksums(folder: Path, names: str = "*.safetensors") -> None:
    """Of the files in the folder whose names are like this; by default of the weights."""
    files = sorted(path for path in folder.glob(names) if path.is_file() and path.name != CHECKSUMS)
    write_json(folder / CHECKSUMS, {path.name: sha256_file(path) for path in files})


def check_checksums(folder: Path) -> None:
    """Raises UserError where a file has changed since its checksum was written. Folders without
    checksums pass."""
    path = folder / CHECKSUMS
    if not path.is_file():
        return
    for name, sha256 in convert(read_json(path), dict[str, str], "", str(path)).items():
        file = folder / Path(name).name
        if file.is_file() and sha256_file(file) != sha256:
            raise UserError(
                f"{file}: has changed since it was saved; fetch or train it again, or remove "
                f"{CHECKSUMS} if that was you"
            )


def unchanged(folder: Path) -> bool:
    """Whether every file that its checksums name is there and as it was written. False for a folder
    without checksums."""
    try:
        checksums = convert(
            read_json(folder / CHECKSUMS), dict[str, str], "", str(folder / CHECKSUMS)
        )
        return bool(checksums) and all(
            sha256_file(folder / Path(n).name) == s for n, s in checksums.items()
        )
    except (UserError, OSError):
        return False


def folder_hash(folder: Path) -> str | None:
    """sha256 over the drafter's config and weights; None where it is no folder."""
    digest = hashlib.sha256()
    files = sorted(
        p
        for p in folder.glob("*")
        if p.name in ("config.json", "drafter.json")
        or p.suffix in (".safetensors", ".bin", ".pt", ".pth")
    )
    for path in files:
        check_ordinary(path)
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest() if files else None
