"""One process at a time writes into an output folder."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from specalign.common.errors import UserError
from specalign.common.files import UNFINISHED

LOCK = ".lock"
WAIT = 1.0
"""Seconds between attempts to claim a folder that another process writes into."""


class FolderInUse(UserError):
    """Another process has claimed the folder."""


class Claim:
    """A folder that only this process writes into, until released or until the process ends.

    The system drops the lock with its process. Unfinished files of killed writers are removed. A
    process may claim a folder twice.

    Args:
        folder: created where it is missing, and removed again if nothing was written into it.
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
            self._created = [p for p in (folder, *folder.parents) if not p.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder.resolve() / LOCK, timeout=0, is_singleton=True)
            self._lock.acquire()
        except Timeout:
            raise FolderInUse(
                f"{key}={folder}: another process writes there; wait until it ends, or choose "
                "another folder"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{key}={folder}: can't be written ({why})") from None
        if self._lock.lock_counter == 1:
            for part in (*folder.glob(f".*{UNFINISHED}"), *folder.glob(f"*/.*{UNFINISHED}")):
                if part.is_dir() and not part.is_symlink():
                    shutil.rmtree(part)
                else:
                    part.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others write there again."""
        if self._lock.lock_counter == 1:
            with suppress(
                OSError
            ):  # before the lock is free: whoever waits for it opens a new file
                os.unlink(self._lock.lock_file)
        self._lock.release()
        if not self._lock.is_locked:
            with suppress(OSError):  # not empty
                for path in self._created:
                    path.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


def claim_when_free(folder: Path, key: str, report: Callable[[str], object]) -> Claim:
    """Claim a folder, after waiting for the process that writes there. `report` gets one line
    before the wait.

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
    """Remove what a killed writer left in the folder, its lock too. Nothing happens where a process
    writes there, or nobody may."""
    if (folder / LOCK).exists():
        with suppress(UserError, OSError), Claim(folder, "folder"):
            pass


def check_folder(folder: Path, key: str) -> None:
    """Whether the folder can be written, or made; it is not made yet. `key`: the option or key that
    named it.

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
    """A folder for temporary files whose name begins with `kind`, in `parent` or where the system
    has such; removed at the end, and so is what killed processes of this user left under such a
    name."""
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
