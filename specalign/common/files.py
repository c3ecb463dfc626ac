"""Atomic file writes, and reading files without executing their content."""

import errno
import gzip
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, system_number


def expand_path(name: str | Path, key: str = "") -> Path:
    """The path with `~` and `~user` in full. Raises UserError: no such user, or no file can have
    this name; the line begins with `key`."""
    try:
        path = Path(name).expanduser()
        str(path).encode()  # records and reports, which name it, are UTF-8
    except (RuntimeError, UnicodeError) as error:
        shown = f"{key}={str(name)!r}" if key else repr(str(name))
        reason = "no such user" if isinstance(error, RuntimeError) else "the name is not UTF-8"
        raise UserError(f"{shown}: {reason}") from None
    return path


UNFINISHED = ".specalign-part"
"""Suffix of the folders in which files are written."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside it system errors, also those that libraries wrap, are OSErrors with `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors' own is no OSError
        number = system_number(error)
        if number is None:
            raise
        reason = getattr(error, "strerror", None) or os.strerror(number)
        raise OSError(number, reason, str(path)) from None


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary path)` in a folder next to `path`, then rename: a kill or a power cut
    leaves the old file or the new one, never a part. In a separate folder, because libraries write
    next to the path that they are given. Raises OSError: it can't be written; names `path`."""
    with naming(path):
        check_ordinary(path)  # a rename would replace a device
        path.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{path.name[:200]}."
        folder = tempfile.mkdtemp(dir=path.parent, prefix=prefix, suffix=UNFINISHED)
        try:
            part = Path(folder, path.name)
            write(part)
            to_disk(part)
            part.chmod(0o644)
            os.replace(part, path)
            to_disk(path.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 as `write_atomically` does."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Any, **options: Any) -> None:
    """Write indented JSON as `write_atomically` does; `options` are those of `json.dumps`."""
    write_text(path, json.dumps(values, indent=2, **options) + "\n")


@contextmanager
def replacing(folder: Path, room: Path) -> Iterator[Path]:
    """Inside it an empty folder, which replaces `folder` at the end: a kill leaves the old one or
    the new one. `room`: where both lie meanwhile; what a killed writer left there is removed."""
    part, old = room / "new", room / "old"
    try:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        yield part
        for file in (*part.rglob("*"), part):
            to_disk(file)
        if folder.is_dir():
            os.replace(folder, old)
        os.replace(part, folder)
        to_disk(folder.parent)
    finally:
        shutil.rmtree(room, ignore_errors=True)


def to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_zst(path: Path, mode: str) -> io.BufferedReader:
    import pyarrow  # here: it takes a third of a second, and few files are packed this way

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), mode), "zstd")
    return io.BufferedReader(stream)


_OPENERS: dict[str, Callable[[Path, str], Any]] = {".gz": gzip.open, ".zst": _open_zst}
PACKED = tuple(_OPENERS)
"""Suffixes of compressed files."""
MOST_BYTES = 1 << 30
"""Of a field of a table."""


@contextmanager
def open_packed(path: Path) -> Iterator[Any]:
    """Open a file for reading bytes, decompressed if its name ends in one of `PACKED`. Raises
    UserError: it can't be read or decompressed, or a text decoded inside is not UTF-8; OSError: it
    is a pipe or a device."""
    check_ordinary(path)
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{path} can't be read: {reason}") from None


def read_text(path: Path) -> str:
    """A whole text file. Raises UserError if it is not UTF-8, or can't be read."""
    with open_packed(path) as file:
        text: str = file.read().decode("utf-8-sig")
        return text


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not, with their ends; memory holds one. Byte order
    marks at the start of lines, of joined files, are dropped. Raises UserError as `read_text`
    does."""
    with open_packed(path) as file:
        for line in file:
            yield line.decode().lstrip("\ufeff")


def check_ordinary(path: Path) -> None:
    """Raises OSError for a pipe, which would block, and a device, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))


def sha256_file(path: Path) -> str:
    """The file's hash, in hex digits."""
    check_ordinary(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_safetensors(path: Path) -> dict[str, Any]:
    """A safetensors file's tensors, memory-mapped. Raises OSError or SafetensorError."""
    from safetensors.torch import load_file

    check_ordinary(path)
    return load_file(path)


def load_tensors(path: Path, allowed: Sequence[Any] = (), **options: Any) -> Any:
    """`torch.load` that builds tensors, plain containers and objects of the `allowed` classes, and
    executes nothing else. Raises UserError: the file names another class or function; OSError:
    it can't be read."""
    import torch

    check_ordinary(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            what = f"contains {foreign[1]} objects besides tensors, so it is not unpickled"
            raise UserError(f"{path}: {what}") from None
        raise
