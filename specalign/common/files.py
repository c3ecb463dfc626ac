"""Files that are either whole or not there, and are read without running what they hold."""

from __future__ import annotations

import bz2
import codecs
import errno
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from specalign.common.errors import UserError, system_number


def expand_path(name: str | Path, key: str = "") -> Path:
    """The path with `~` and `~user` in full.

    Raises:
        UserError: no such user, or no file can have this name; the line begins with `key`, if one
            is given.
    """
    said = f"{key}={str(name)!r}" if key else repr(str(name))
    try:
        path = Path(name).expanduser()
        os.fsencode(path)
    except RuntimeError:
        raise UserError(f"{said}: no such user on this machine") from None
    except ValueError as error:
        raise UserError(f"{said}: no file can have this name ({error})") from None
    if "\0" in str(name):
        raise UserError(f"{said}: no file can have this name (it holds a NUL)")
    try:
        str(path).encode()
    except UnicodeEncodeError:  # records and reports, which name it, are UTF-8
        raise UserError(f"{said}: the name is not UTF-8; rename it") from None
    return path


UNFINISHED = ".specalign-part"
"""How the name of a folder ends in which a file is being written."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Inside this context what the system says, to us or to a library, is an OSError that names
    `path`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # safetensors' own is no OSError
        number = system_number(error)
        if number is None:
            raise
        raise OSError(
            number, getattr(error, "strerror", None) or os.strerror(number), str(path)
        ) from None


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Call `write(temporary path)` in a folder next to `path`, then rename: a kill or a power cut
    leaves the old file or the new, never a part. In a separate folder, because libraries write
    next to the path that they are given.

    Raises:
        OSError: it can't be written; names `path`.
    """
    folder = None
    try:
        with naming(path):
            if (
                path.is_char_device() or path.is_block_device()
            ):  # a rename would put a file in its place
                check_ordinary(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(
                dir=path.parent, prefix=f".{path.name[:200]}.", suffix=UNFINISHED
            )
            part = Path(folder, path.name)
            write(part)
            to_disk(part)
            part.chmod(0o644)
            os.replace(part, path)
            to_disk(path.parent)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def remove_parts(path: Path) -> None:
    """What killed writers of a file left next to it is removed; for a file in a folder that no command
    claims."""
    for part in path.parent.glob(f".{glob.escape(path.name[:200])}.*{UNFINISHED}"):
        shutil.rmtree(part, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 as `write_atomically` does."""
    write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))


def write_json(path: Path, values: Any, **options: Any) -> None:
    """Write JSON for people to read too, as `write_atomically` does; `options` are those of
    `json.dumps`."""
    write_text(path, json.dumps(values, indent=2, **options) + "\n")


def to_disk(path: Path) -> None:
    """Wait until a file, or a folder's list of names, has reached the disk: a rename may overtake
    what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MOST_BYTES = 1 << 30
"""Of a text that is read whole."""


def _open_zst(path: Path, mode: str) -> io.BufferedReader:
    import pyarrow  # here: it takes a third of a second, and few files are packed this way

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path), mode), "zstd")
    return io.BufferedReader(stream)


_OPENERS: dict[str, Callable[[Path, str], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zst,
}
PACKED = tuple(_OPENERS)
"""Endings of packed files."""


@contextmanager
def open_packed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading bytes, unpacked where its name ends in one of `PACKED`.

    Raises:
        UserError: the packed content is broken.
        OSError: it can't be read, or is a pipe or a device.
    """
    check_ordinary(path)
    try:
        with _OPENERS.get(path.suffix.lower(), open)(path, "rb") as file:
            yield file
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} can't be read: {error}") from None


def read_bytes(path: Path) -> bytes:
    """A whole file, unpacked as `open_packed` does.

    Raises:
        UserError: more than `MOST_BYTES`: a packed file may hold a thousand times its size.
        OSError: it can't be read, or is a pipe or a device.
    """
    with open_packed(path) as file:
        size = path.stat().st_size
        raw = b"" if size > MOST_BYTES else bytes(file.read(MOST_BYTES + 1))
    if max(size, len(raw)) > MOST_BYTES:
        raise UserError(f"{path}: more than {MOST_BYTES >> 20} MiB, or without end; it is not read")
    return raw


_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(path: Path) -> str:
    """A whole text file: UTF-8, or UTF-16 with a byte order mark. Raises UserError where it is
    neither or can't be read."""
    encoding = "UTF-8"
    try:
        raw = read_bytes(path)
        if raw.startswith(_UTF16_MARKS):
            encoding = "UTF-16"
            return raw.decode(encoding)
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not {encoding} text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file, packed or not, with their ends; memory holds one, or all of a
    UTF-16 file. A byte order mark at the start of any line is dropped: files that begin with one
    are often joined.

    Raises:
        UserError: it is no such text, can't be read, or has a line of more than `MOST_BYTES`.
    """
    number = start = 0
    try:
        with open_packed(path) as file:
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                if number == 1 and line.startswith(_UTF16_MARKS):
                    yield from (text.lstrip("\ufeff") for text in io.StringIO(read_text(path)))
                    return
                if len(line) > MOST_BYTES:
                    raise UserError(
                        f"{path}, line {number}: more than {MOST_BYTES >> 20} MiB, or without end"
                    )
                yield line.decode().lstrip("\ufeff")
                start += len(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {start + error.start})") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from None


def check_ordinary(path: Path) -> None:
    """Raises OSError for a pipe, which would be waited for, and a device, which may have no end."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "is no ordinary file", str(path))


def sha256_file(path: Path) -> str:
    """The file's hash, in hex digits."""
    check_ordinary(path)
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_safetensors(path: Path) -> dict[str, Any]:
    """A safetensors file's tensors, memory-mapped.

    Raises:
        OSError: it can't be read, or is a pipe or a device. SafetensorError: it is none.
    """
    from safetensors.torch import load_file

    check_ordinary(path)
    return load_file(path)


def load_tensors(path: Path, allowed: Sequence[Any] = (), **options: Any) -> Any:
    """`torch.load` that builds tensors, plain containers and objects of the `allowed` classes, and
    runs nothing else.

    Raises:
        ForeignObject: the file names another class or function.
        OSError: it can't be read, or is a pipe or a device.
    """
    import torch

    check_ordinary(path)
    try:
        with torch.serialization.safe_globals(list(allowed)):
            return torch.load(path, weights_only=True, **options)
    except pickle.UnpicklingError as error:
        if foreign := re.search(r"GLOBAL (\S+)", str(error)):
            raise ForeignObject(path, foreign[1]) from None
        raise


class ForeignObject(UserError):
    """A file of tensors asks for something else to be built or run."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(f"{path}: holds {name} objects, not tensors alone, and is not unpickled")
