"""User and machine errors: a one-line message that names the cause, an exit code, no traceback."""

import contextlib
import difflib
import errno
import functools
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specalign.common.text import say
from specalign.common.threads import wait_passively_if_busy


class UserError(ValueError):
    """Invalid input that the user can correct. One line: the key, file or value, and a hint."""


_LISTED = 20


def nearest(name: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest choice, ignoring case, else ` (one of: …)`."""
    names = sorted({str(choice) for choice in choices})
    folded = {choice.casefold(): choice for choice in reversed(names)}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    if close:
        return f" (did you mean '{folded[close[0]]}'?)"
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f" (one of: {', '.join(names[:_LISTED])}{more})" if names else ""


@contextlib.contextmanager
def in_one_line(where: str) -> Iterator[None]:
    """Context manager that turns a library's errors about user input into UserError: `where: last
    line`."""
    try:
        yield
    except Exception as error:  # transformers' errors over a wrong config have no common class
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{where}: {line}") from None


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
_OUT_OF_MEMORY = "out of memory|not enough memory|allocate memory"


def system_number(error: BaseException) -> int | None:
    """The errno of a system error, also if safetensors or torch wrapped it; else None."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    wrapped = re.search(r"os error (\d+)|\berrno\W+(\d+)", str(error))
    return int(wrapped[1] or wrapped[2]) if wrapped else None


def what_happened(error: BaseException) -> tuple[str, int] | None:
    """One line and the exit code for what a user or the machine can cause: 2 for an input, 1 for a
    full or broken disk. None for a bug, which keeps its traceback."""
    if isinstance(error, UserError):
        return str(error), 2
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, OSError):
        names = [
            os.fsdecode(n) for n in (error.filename, error.filename2) if type(n) in (str, bytes)
        ]
        if names and error.strerror:
            text = f"{' → '.join(names)}: {error.strerror}"
        return text, 1 if error.errno in _DISK else 2
    if system_number(error) in _DISK or "PytorchStreamWriter" in text:
        return f"can't write a file: the disk is full or broken ({text[:120]})", 1
    is_memory = isinstance(error, RuntimeError) and re.search(_OUT_OF_MEMORY, text)
    if isinstance(error, MemoryError) or is_memory:
        return f"not enough memory: {text[:200]}", 2
    return None


def cli(main: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a command: input and machine errors become `error: …` on stderr and an exit code.

    Exit codes: those of `what_happened`; 130 for Ctrl-C and SIGTERM; 141 if the reader of the
    output is gone (`… | head`).
    """

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        wait_passively_if_busy()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:  # the interpreter would fail to flush at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        except KeyboardInterrupt:
            say("interrupted; rerun the command to resume", error=True)
            raise SystemExit(130) from None
        except Exception as error:
            found = what_happened(error)
            if found is None:
                raise
            message, code = found
            say(f"error: {' '.join(message.split())}", error=True)
            raise SystemExit(code) from None

    return run
