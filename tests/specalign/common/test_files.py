"""A file is written whole or not at all; a drafter's files are as they were saved, or refused."""

import errno
import gzip
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest
import torch
from safetensors.torch import save_file

from specalign.common import files
from specalign.common.checksums import check_checksums, write_checksums
from specalign.common.errors import UserError
from specalign.common.files import expand_path, naming, write_atomically


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.txt"
    write_atomically(path, lambda p: p.write_text("one"))

    def fail(part: Path) -> None:
        part.write_text("half")
        (part.parent / ".tmp1a2b3c").touch()  # as safetensors does
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, fail)
    assert path.read_text() == "one" and list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_name_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(UserError, match="--out=.*the name is not UTF-8"):
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
    path, tensors = tmp_path / "x.safetensors", {"a": torch.zeros(9999)}
    with pytest.raises(OSError) as said:
        write_atomically(path, lambda part: save_file(tensors, str(part)))
    assert (said.value.errno, said.value.filename) == (errno.EFBIG, str(path))
    with pytest.raises(OSError) as said, naming(path):
        path.write_bytes(bytes(9999))
    assert (said.value.errno, said.value.filename) == (errno.EFBIG, str(path))


def test_lines_of_a_file(tmp_path: Path) -> None:
    """With their ends, without the byte order marks of joined files."""
    path = tmp_path / "f.txt"
    path.write_bytes("\ufeffa\r\n\n\ufeffb\u2028c".encode())
    assert list(files.read_lines(path)) == ["a\r\n", "\n", "b\u2028c"]
    path.write_bytes(b"good\n\xff")
    lines = files.read_lines(path)
    assert next(lines) == "good\n"
    with pytest.raises(UserError, match=r"f.txt is not UTF-8 text"):
        next(lines)


@pytest.mark.parametrize("ending", files.PACKED)
def test_a_packed_file_that_is_cut_is_named(tmp_path: Path, ending: str) -> None:
    text = b"text" * 99
    zstd = pyarrow.Codec("zstd").compress(text, asbytes=True)
    packed = gzip.compress(text) if ending == ".gz" else zstd
    path = tmp_path / f"f.txt{ending}"
    path.write_bytes(packed)
    assert files.read_text(path) == "text" * 99
    path.write_bytes(packed[:-5])
    with pytest.raises(UserError, match=r"f.txt.* can't be read"):
        files.read_text(path)


def test_changed_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "README.md").write_text("a card")
    check_checksums(tmp_path)  # folders without checksums pass
    write_checksums(tmp_path)
    (tmp_path / "README.md").write_text("another card")
    check_checksums(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weighed")
    with pytest.raises(UserError, match="model.safetensors: has changed since it was saved"):
        check_checksums(tmp_path)
    (tmp_path / "checksums.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="a=1 must be text"):
        check_checksums(tmp_path)
