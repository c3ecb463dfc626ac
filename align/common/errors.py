"""What a user sees when an input is wrong: one line that names it, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
import difflib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class UserError(ValueError):
    """An input that the user can mend. Its message is one line: the key, file or value, and the nearest valid one."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the closest choice, or the list of choices when none is close."""
    names = sorted({str(choice) for choice in choices})
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    if close:
        return f" (did you mean '{close[0]}'?)"
    return f" (one of: {', '.join(names)})" if names else ""


@contextlib.contextmanager
def in_one_line(where: str) -> Iterator[None]:
    """Whatever a library raises over a user's values becomes `where: its last line`, a UserError."""
    try:
        yield
    except Exception as error:  # what a config of wrong values makes of transformers has no common class
        line = (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()
        raise UserError(f"{where}: {line}") from None


def cli(main: Callable[..., Any]) -> Callable[..., None]:
    """Wrap a command: `UserError` becomes `error: …` on stderr and exit code 2, Ctrl-C and SIGTERM exit code 130."""

    @functools.wraps(main)
    def run(*args: Any, **kwargs: Any) -> None:
        alone = threading.current_thread() is threading.main_thread()
        if alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            main(*args, **kwargs)
        except UserError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise SystemExit(2) from None
        except KeyboardInterrupt:
            print("interrupted: run the same command again to continue", file=sys.stderr)
            raise SystemExit(130) from None
        except BrokenPipeError:  # `… | head`: the reader has had enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(0) from None

    return run
