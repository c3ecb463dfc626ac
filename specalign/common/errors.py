"""What a user sees when an input is wrong or the machine fails: one line that names it, an exit
code, no traceback."""

from __future__ import annotations

import _thread
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
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from types import FrameType
from typing import Any, NoReturn

from specalign.common.text import say
from specalign.common.threads import wait_passively_if_busy


class UserError(ValueError):
    """An input that the user can mend. Its message is one line: the key, file or value, and the
    nearest valid one."""


class UserErrors(UserError):
    """Several of them. Its message has a line each, below a heading."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = [" ".join(problem.split()) for problem in problems]
        lines = [f"{len(self.problems)} things are missing or can't be used:", *self.problems]
        super().__init__("\n  - ".join(lines))


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Run every check, and report all that they find at once.

    Raises:
        UserError: what a check raised; UserErrors where several did.
    """
    found: list[UserError] = []
    for check in checks:
        try:
            check()
        except UserError as error:
            found.append(error)
    problems = [p for e in found for p in (e.problems if isinstance(e, UserErrors) else [str(e)])]
    problems = list(dict.fromkeys(problems))
    if len(problems) > 1:
        raise UserErrors(problems)
    if found:
        raise found[0]


_LISTED = 240
"""Characters of a list of choices."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest choice, capitals or not, or a list of choices when
    none is close, cut where it is long."""
    names = sorted({str(choice) for choice in choices})
    folded = {choice.casefold(): choice for choice in reversed(names)}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.5)
    if close:
        return f" (did you mean '{folded[close[0]]}'?)"
    lengths = accumulate(len(name) + 2 for name in names)
    shown = max(1, sum(length <= _LISTED for length in lengths))
    more = f", and {len(names) - shown} more" if len(names) > shown else ""
    return f" (one of: {', '.join(names[:shown])}{more})" if names else ""


@contextlib.contextmanager
def in_one_line(where: str) -> Iterator[None]:
    """Whatever a library raises over a user's values becomes `where: its last line`, a
    UserError."""
    try:
        yield
    except (
        Exception
    ) as error:  # what a config of wrong values makes of transformers has no common class
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{where}: {line}") from None


_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
"""What no other input mends: a full or broken disk."""


def system_number(error: BaseException) -> int | None:
    """The number of what the system said, which safetensors and torch's writer wrap; None for
    anything else."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    wrapped = re.search(r"os error (\d+)|\berrno\W+(\d+)", " ".join(str(error).split()))
    return int(wrapped[1] or wrapped[2]) if wrapped else None


def what_happened(error: BaseException) -> tuple[str, int] | None:
    """One line and the exit code for what a user or the machine can cause: 2 for an input, 1 for a
    disk that is full or broken. None for a mistake of ours, which keeps its traceback.
    """
    if isinstance(error, UserError):
        return str(error), 2
    text = " ".join(str(error).split())
    number = system_number(error)
    if isinstance(error, OSError):
        names = [
            os.fsdecode(name)
            for name in (error.filename, error.filename2)
            if isinstance(name, str | bytes)
        ]
        text = (
            f"{' → '.join(names)}: {error.strerror}"
            if names and error.strerror
            else error.strerror or text
        )
        return text or type(error).__name__, 1 if number in _MACHINE else 2
    if number is not None and type(error).__name__ == "SafetensorError":
        return (
            f"a file can't be read or written: {os.strerror(number)}",
            1 if number in _MACHINE else 2,
        )
    if isinstance(error, RuntimeError) and re.search(
        "PytorchStreamWriter|inline_container|write failed", text
    ):
        return f"a file can't be written, the disk is full or broken ({text[:120]})", 1
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search("out of memory|not enough memory|allocate memory", text)
    ):
        return f"not enough memory{': ' + text[:200] if text else ''}", 2
    return None


def cli(main: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a command: input and machine errors become `error: …` on stderr and an exit code.

    Exit codes: those of `what_happened`; 130 for Ctrl-C and SIGTERM; 141 where the reader of the
    output is gone (`… | head`).
    """

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        wait_passively_if_busy()
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if in_main_thread else ():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _interrupted)
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _end("", 128 + signal.SIGPIPE)
        except KeyboardInterrupt:
            _end("interrupted: run the same command again to continue", 130)
        except Exception as error:
            found = what_happened(error)
            if found is None:
                raise
            message, code = found
            if not isinstance(error, UserErrors):
                message = " ".join(message.split())
            _end(f"error: {message}", code)

    return run


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but after an import: libraries catch whatever is raised while they
    import others."""
    if any(
        "importlib._bootstrap" in at.f_code.co_filename for at, _ in traceback.walk_stack(frame)
    ):
        threading.Timer(0.05, _thread.interrupt_main, [number]).start()
    else:
        raise KeyboardInterrupt


def _end(line: str, code: int) -> NoReturn:
    """Print the message and exit. Output that can no longer be written is dropped: the interpreter
    would fail at its exit."""
    with contextlib.suppress(OSError, ValueError):
        if line:
            say(line, error=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    raise SystemExit(code) from None
