"""A bound on what foreign code may take: seconds and memory. For chat templates, which are programs
that come with a model."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from specalign.common.errors import UserError

SECONDS = 5.0
"""An ordinary template takes a millisecond."""
GROWTH = 1 << 30
"""Bytes."""


@contextlib.contextmanager
def bounded(what: str, seconds: float | None = None) -> Iterator[None]:
    """Inside this context the process may take `seconds` (`SECONDS`; known on the main thread
    alone) and so much more memory (Linux).

    Raises:
        UserError: `what` takes more.
    """

    seconds = SECONDS if seconds is None else seconds

    def too_long(*_: object) -> NoReturn:
        raise UserError(f"{what} takes longer than {seconds:g} seconds")

    with contextlib.ExitStack() as undo:
        _limit_memory(undo)
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            undo.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, too_long))
            undo.callback(
                signal.setitimer, signal.ITIMER_REAL, *signal.setitimer(signal.ITIMER_REAL, seconds)
            )
        try:
            yield
        except (MemoryError, OverflowError):
            raise UserError(f"{what} takes more than {GROWTH / 2**30:g} GiB") from None


def _limit_memory(undo: contextlib.ExitStack) -> None:
    """Let allocations fail that would take more, where the system tells how much is taken."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError, ValueError):
        return
    own: Any = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + GROWTH
    if own[0] == resource.RLIM_INFINITY or most < own[0]:
        resource.setrlimit(resource.RLIMIT_AS, (most, own[1]))
        undo.callback(resource.setrlimit, resource.RLIMIT_AS, own)
