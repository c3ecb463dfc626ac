"""Checksums of a folder's files, in a separate file that other loaders ignore."""

import hashlib
import json
from pathlib import Path

from specalign.common.errors import UserError
from specalign.common.files import check_ordinary, sha256_file, write_json
from specalign.common.schema import convert, read_json

CHECKSUMS = "checksums.json"
_CONFIGS = ("config.json", "drafter.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")


def write_checksums(folder: Path, names: str = "*.safetensors") -> None:
    """Write checksums of the files in the folder that match these names; by default of the
    weights."""
    files = sorted(path for path in folder.glob(names) if path.is_file() and path.name != CHECKSUMS)
    write_json(folder / CHECKSUMS, {path.name: sha256_file(path) for path in files})


def _read_checksums(folder: Path) -> dict[Path, str]:
    path = folder / CHECKSUMS
    if not path.is_file():
        return {}
    found = convert(read_json(path), dict[str, str], "", str(path))
    return {folder / Path(name).name: sha256 for name, sha256 in found.items()}


def check_checksums(folder: Path) -> None:
    """Raises UserError if a file has changed since its checksum was written."""
    for file, sha256 in _read_checksums(folder).items():
        if file.is_file() and sha256_file(file) != sha256:
            raise UserError(
                f"{file}: has changed since it was saved; fetch or train it again, or delete "
                f"{CHECKSUMS} if the change is intended"
            )


def is_unchanged(folder: Path) -> bool:
    """Whether the folder has checksums, and all files that they name as they were written."""
    try:
        checksums = _read_checksums(folder)
        return bool(checksums) and all(sha256_file(f) == s for f, s in checksums.items())
    except (UserError, OSError):
        return False


def folder_hash(folder: Path) -> str | None:
    """sha256 over the drafter's config and weights; None if there are none."""
    digest = hashlib.sha256()
    files = [p for p in sorted(folder.glob("*")) if p.name in _CONFIGS or p.suffix in _WEIGHTS]
    for path in files:
        check_ordinary(path)
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest() if files else None


def hash_json(value: object) -> str:
    """The checksum of what JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
