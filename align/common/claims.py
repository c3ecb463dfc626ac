"""One process at a time writes into an output folder."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from align.common.errors import UserError
from align.common.files import UNFINISHED

LOCK = ".lock"
WAIT = 1.0
"""Seconds between attempts to claim a folder that another process writes into."""

_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.ENXIO}
"""What opening the lock says of a link, a folder and a socket."""
_held: dict[str, tuple[int, int]] = {}
"""Real path of a lock that this process holds → its handle, and how many claims share it."""


class FolderInUse(UserError):
    """Another process has claimed the folder."""


class Claim:
    """A folder that this process alone writes into, until released or until the process ends.

    The system drops the lock with its process, whatever ends that; so one that is found is never a dead one's. What killed
    writers left in the folder is removed. A process may claim a folder twice.

    Args:
        folder: made where it is missing, and removed again where nothing was put into it.
        key: the option or key that named it, for messages.

    Raises:
        FolderInUse: another process has claimed it.
        UserError: it can't be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        try:
            if folder.exists() and not folder.is_dir():
                raise UserError(f"{key}={folder} is a file, not a folder")
            self._made = [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._name = str(folder.resolve() / LOCK)
            handle, count = _held.get(self._name, (-1, 0))
            _held[self._name] = (handle if count else _lock(self._name), count + 1)
        except UserError:
            raise
        except _Taken as taken:
            raise FolderInUse(
                f"{key}={folder}: process {taken} writes there; wait for its end, or take another folder"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            if getattr(error, "errno", None) in _NO_FILE:
                raise UserError(f"{key}={folder}: {LOCK} in it is no lock of ours; remove it") from None
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{key}={folder}: can't be written ({why})") from None
        if not count:
            for part in (*folder.glob(f".*{UNFINISHED}"), *folder.glob(f"*/.*{UNFINISHED}")):
                if part.is_dir() and not part.is_symlink():
                    shutil.rmtree(part)
                else:
                    part.unlink(missing_ok=True)

    def release(self) -> None:
        """Others may write there again."""
        handle, count = _held.pop(self._name, (-1, 0))
        if count > 1:
            _held[self._name] = (handle, count - 1)
        if count != 1:
            return
        with suppress(OSError):  # the lock goes last: whoever waited for it finds its name gone and asks anew
            os.unlink(self._name)
        os.close(handle)
        with suppress(OSError):  # not empty
            for path in self._made:
                path.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim_when_free(folder: Path, key: str, report: Callable[[str], object]) -> Claim:
    """Claim a folder, after waiting for the process that writes there. `report` gets one line before the wait.

    Raises:
        UserError: the folder can't be written.
    """
    waits = False
    while True:
        try:
            return Claim(folder, key)
        except FolderInUse as error:
            if not waits:
                report(f"note: {str(error).partition(';')[0]}; this one waits for it")
            waits = True
            time.sleep(WAIT)


def tidy(folder: Path) -> None:
    """Remove what a killed writer left in the folder, its lock too. Nothing happens where a process writes there, or nobody may."""
    if (folder / LOCK).exists():
        with suppress(UserError, OSError), Claim(folder, "folder"):
            pass


def check_folder(folder: Path, key: str) -> None:
    """Whether the folder can be written, or made; it is not made yet. `key`: the option or key that named it.

    Raises:
        UserError: it can't.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise NotADirectoryError(None, f"{there} is not a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(None, f"no permission in {there}")
    except OSError as error:
        raise UserError(f"{key}={folder}: can't be written ({error.strerror or error})") from None


@contextmanager
def scratch(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """A folder for temporary files whose name begins with `kind`, in `parent` or where the system has such; removed at the end, and so
    is what killed processes of this user left under such a name."""
    place = parent or Path(tempfile.gettempdir())
    remove_dead(place, kind)
    folder = Path(tempfile.mkdtemp(prefix=kind, dir=place))
    try:
        with Claim(folder, "temporary folder"):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_dead(place: Path, kind: str) -> None:
    """Remove folders in `place` whose names begin with `kind` and which no process holds."""
    with suppress(OSError):
        for folder in place.iterdir():
            if folder.name.startswith(kind) and not folder.is_symlink() and folder.is_dir():
                with suppress(OSError, UserError):
                    if folder.stat().st_uid == os.getuid():
                        with Claim(folder, "temporary folder"):
                            shutil.rmtree(folder, ignore_errors=True)


class _Taken(Exception):
    """By the process whose number this says."""


def _lock(name: str) -> int:
    """A handle on the file of that name, locked. POSIX locks belong to a process: its forked workers do not keep them alive."""
    while True:
        # a link would lead to a file of somebody else's choice
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            os.close(handle)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            number = os.read(handle, 20).decode("ascii", "replace").strip()
            os.close(handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _Taken(number or "of another command") from None
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(name)):
                with suppress(OSError):  # a full disk: the number is for messages alone
                    os.ftruncate(handle, 0)
                    os.write(handle, f"{os.getpid()}\n".encode())
                return handle
        os.close(handle)  # its holder removed it meanwhile
