"""What a user sees when an input is wrong or the machine fails: one line that names it, an exit code, no traceback."""

from __future__ import annotations

import _thread
import contextlib
import difflib
import errno
import functools
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

from align.common.streams import close_output, open_streams, unread
from align.common.text import guard_library_output, say
from align.common.threads import wait_passively_if_busy


class UserError(ValueError):
    """An input that the user can mend. Its message is one line: the key, file or value, and the nearest valid one."""


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
    """` (did you mean 'x'?)` for the closest choice, capitals or not, or a list of choices when none is close, cut where it is long."""
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
    """Whatever a library raises over a user's values becomes `where: its last line`, a UserError."""
    try:
        yield
    except Exception as error:  # what a config of wrong values makes of transformers has no common class
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{where}: {line}") from None


_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG}
"""What no other input mends: a full or broken disk."""


def system_number(error: BaseException) -> int | None:
    """The number of what the system said, which safetensors and torch's writer wrap; None for anything else."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    wrapped = re.search(r"os error (\d+)|\berrno\W+(\d+)", " ".join(str(error).split()))
    return int(wrapped[1] or wrapped[2]) if wrapped else None


def what_happened(error: BaseException) -> tuple[str, int] | None:
    """One line and the exit code for what a user or the machine can cause: 2 for an input, 1 for a disk that is full or broken.
    None for a mistake of ours, which keeps its traceback.
    """
    if isinstance(error, UserError):
        return str(error), 2
    text = " ".join(str(error).split())
    number = system_number(error)
    if isinstance(error, OSError):
        names = [
            os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes)
        ]
        text = (
            f"{' → '.join(names)}: {error.strerror}" if names and error.strerror else error.strerror or text
        )
        return text or type(error).__name__, 1 if number in _MACHINE else 2
    if number is not None and type(error).__name__ == "SafetensorError":
        return f"a file can't be read or written: {os.strerror(number)}", 1 if number in _MACHINE else 2
    if isinstance(error, RuntimeError) and re.search(
        "PytorchStreamWriter|inline_container|write failed", text
    ):
        return f"a file can't be written, the disk is full or broken ({text[:120]})", 1
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and re.search("out of memory|not enough memory|allocate memory", text)
    ):
        return f"not enough memory{': ' + text[:200] if text else ''}", 2
    return _at_import(error)


def _at_import(error: BaseException) -> tuple[str, int] | None:
    """The same of a library that its own settings keep from being imported: a variable of the environment, a file of the user's."""
    loading = [
        frame.f_globals.get("__name__", "")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "<module>" and "-packages" in frame.f_code.co_filename
    ]
    if not loading or isinstance(error, ImportError | AttributeError | SyntaxError):
        return None  # of another version than it should be
    line = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    named = [
        f"{key}={value}"
        for key, value in os.environ.items()
        if value and not value.isdigit() and re.search(rf"(?<!\w){re.escape(value)}(?!\w)", line)
    ]
    cause = (
        f"set {' or '.join(named[:3])} otherwise"
        if named
        else f"mend or remove {file}"
        if isinstance(error, UnicodeError) and (file := _being_read(error))
        else "look at its variables in the environment and its own files"
    )
    return f"{loading[-1].split('.')[0]} can't be loaded ({line[:200]}): {cause}", 2


def _being_read(error: BaseException) -> str | None:
    """The file that a library was reading: Python's error over bytes that are no text does not name it."""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            own = isinstance(value, str | os.PathLike) and not str(value).endswith((".py", ".pyc"))
            if own and os.path.isfile(value):
                return str(value)
    return None


def cli(main: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a command: what a user or the machine caused becomes `error: …` on stderr and an exit code (`what_happened`), Ctrl-C
    and SIGTERM exit code 130. Where nobody reads its output any more (`… | head`) it ends without a word, as other programs do.
    """

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        open_streams()
        guard_library_output()
        wait_passively_if_busy()
        alone = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if alone else ():
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, _interrupted)
        before = sys.unraisablehook
        sys.unraisablehook = functools.partial(_raised_in_freeing, before)
        try:
            main(*args, **kwargs)
            sys.stdout.flush()
        except SystemExit:  # --help, or a verdict
            close_output()
            raise
        except KeyboardInterrupt:
            _end("interrupted: run the same command again to continue", 130)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and unread():
                _end("", _UNREAD)
            found = what_happened(error)
            if found is None:
                raise
            said = found[0] if isinstance(error, UserErrors) else " ".join(found[0].split())
            _end(f"error: {said}", found[1])
        finally:
            sys.unraisablehook = before

    return run


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, but not within an import, where libraries catch whatever is raised: once more, when that is over."""
    if any("importlib._bootstrap" in at.f_code.co_filename for at, _ in traceback.walk_stack(frame)):
        threading.Timer(0.05, _thread.interrupt_main, [number]).start()
    else:
        raise KeyboardInterrupt


def _raised_in_freeing(before: Callable[[Any], Any], what: Any) -> None:
    """Python prints what is raised while an object is freed, and goes on. Ctrl-C just then comes once more, when that is over; as SIGTERM,
    for SIGINT may be ignored, as behind `&`."""
    if what.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main, [signal.SIGTERM]).start()
    else:
        before(what)


_UNREAD = 128 + 13
"""What a shell says of a program that wrote to a closed pipe: not 0, for its work is not done."""


def _end(line: str, code: int) -> NoReturn:
    """Say why, if anybody listens, and exit."""
    close_output()
    if line:
        with contextlib.suppress(OSError, ValueError):
            say(line, error=True)
        close_output()
    raise SystemExit(code) from None
