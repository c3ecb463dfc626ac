"""Locks an output folder, so that only one process at a time writes to it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

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

    It is created if missing; unfinished files of killed writers are removed. A process may claim a
    folder twice. `key`: the option that named it. Raises FolderInUse: another process has claimed
    it; UserError: it can't be written.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        if os.path.isfile(folder):
            raise UserError(f"{key}={folder} is a file, not a folder")
        try:
            self._created = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder.resolve() / LOCK, timeout=0, is_singleton=True)
            self._lock.acquire()
        except Timeout:
            raise FolderInUse(
                f"{key}={folder}: another process is writing there; wait until it finishes, or "
                "choose another folder"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{key}={folder}: can't be written ({why})") from None
        if self._lock.lock_counter == 1:
            for pattern in (f".*{UNFINISHED}", f"*/.*{UNFINISHED}"):
                for part in folder.glob(pattern):
                    shutil.rmtree(part, ignore_errors=True)

    def release(self) -> None:
        """Let others write there again."""
        if self._lock.lock_counter == 1:
            # before the lock is free: a process that waits for it opens a new file
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()
        if self._created and not self._lock.is_locked:
            with suppress(OSError):  # not empty
                self.folder.rmdir()

    def __enter__(self) -> Claim:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def claim_when_free(folder: Path, key: str, report: Callable[[str], object]) -> Claim:
    """Claim a folder, after waiting for the process that writes there. `report` gets one line
    before the wait. Raises UserError: the folder can't be written."""
    with suppress(FolderInUse):
        return Claim(folder, key)
    report(f"note: {key}={folder}: another process is writing there; waiting for it")
    while True:
        with suppress(FolderInUse):
            return Claim(folder, key)
        time.sleep(WAIT)


def check_folder(folder: Path, key: str) -> None:
    """Check that the folder can be written or created; it is not created yet. Raises UserError: it
    can't; the line begins with `key`, the option that named it."""
    reason = ""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            reason = f"{existing} is not a folder"
        elif not os.access(existing, os.W_OK | os.X_OK):
            reason = f"no permission in {existing}"
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise UserError(f"{key}={folder}: can't be written ({reason})")
