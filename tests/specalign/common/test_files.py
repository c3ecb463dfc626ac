"""A file is written whole or not at all."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from safetensors.torch import save_file

from specalign.common import files
from specalign.common.errors import UserError
from specalign.common.files import (
    expand_path,
    load_safetensors,
    load_tensors,
    naming,
    remove_parts,
    sha256_file,
    write_atomically,
)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_atomically(path, lambda p: p.write_text("one"))

    def fail(part: Path) -> None:
        part.write_text("half")
        (part.parent / ".tmp1a2b3c").touch()  # safetensors writes so, and renames
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "device"
    path.symlink_to("/dev/null")
    with pytest.raises(OSError, match="is no ordinary file"):
        write_atomically(path, lambda p: p.write_text("one"))
    assert path.is_char_device() and list(tmp_path.iterdir()) == [path]


def test_what_killed_writers_of_a_file_left_goes(tmp_path: Path) -> None:
    for name in (
        ".p[1].json.ab12.specalign-part",
        ".p1.json.ab12.specalign-part",
        ".p[1].json.mine",
    ):
        (tmp_path / name).mkdir()
    remove_parts(tmp_path / "p[1].json")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".p1.json.ab12.specalign-part",
        ".p[1].json.mine",
    ]


@pytest.mark.parametrize("read", [sha256_file, load_safetensors, load_tensors])
def test_what_has_no_end_is_not_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """A pipe would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with pytest.raises(OSError, match="is no ordinary file"):
            read(tmp_path / name)


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UserError, match=r"--out='/tmp/x\\udcff': the name is not UTF-8; rename it"):
        expand_path("/tmp/x\udcff", "--out")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of this process end after a thousand bytes."""
    heard = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, own[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, own)
    signal.signal(signal.SIGXFSZ, heard)


def test_a_full_disk_is_said_with_the_file(tmp_path: Path, full: None) -> None:
    """Of safetensors too, whose error is no OSError; the system itself names no file where a write into an open one fails."""
    path, tensors = tmp_path / "x.safetensors", {"a": torch.zeros(9999)}
    with pytest.raises(OSError) as said:
        write_atomically(path, lambda part: save_file(tensors, str(part)))
    assert (said.value.errno, said.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(OSError) as said, naming(path):
        path.write_bytes(bytes(9999))
    assert (said.value.errno, said.value.filename) == (errno.EFBIG, str(path))


def test_what_the_system_did_not_say_stays_what_it_is(tmp_path: Path) -> None:
    for error in (UserError("x: os error 28"), KeyError("x"), OSError("no number")):
        with pytest.raises(type(error)) as said, naming(tmp_path):
            raise error
        assert said.value is error


def test_lines_of_a_file_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their ends, without the byte order marks of files that were joined; broken text and a line without end are named."""
    path = tmp_path / "f.txt"
    path.write_bytes("\ufeffa\r\n\n\ufeffb\u2028c".encode())
    assert list(files.read_lines(path)) == ["a\r\n", "\n", "b\u2028c"]
    path.write_bytes(b"good\n\xff")
    lines = files.read_lines(path)
    assert next(lines) == "good\n"
    with pytest.raises(UserError, match=r"f.txt is not UTF-8 text \(byte 5\)"):
        next(lines)
    monkeypatch.setattr(files, "MOST_BYTES", 4)
    with pytest.raises(UserError, match="f.txt, line 1: more than 0 MiB, or without end"):
        next(files.read_lines(path))


@pytest.mark.parametrize("ending", files.PACKED)
def test_a_packed_file_that_is_cut_is_named(tmp_path: Path, ending: str) -> None:
    packed = {
        ".gz": gzip.compress(b"text" * 99), ".bz2": bz2.compress(b"text" * 99), ".xz": lzma.compress(b"text" * 99),
        ".zst": pyarrow.Codec("zstd").compress(b"text" * 99, asbytes=True),
    }[ending]  # fmt: skip
    path = tmp_path / f"f.txt{ending}"
    path.write_bytes(packed)
    assert files.read_text(path) == "text" * 99
    path.write_bytes(packed[:-5])
    with pytest.raises(UserError, match=r"f.txt.* can't be read"):
        files.read_text(path)
