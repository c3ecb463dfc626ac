"""Standard input, output and error that take any text: in any encoding, and where they are closed."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import sys

_LETTERS = {
    "τ": "tau", "α": "alpha", "γ": "gamma", "σ": "sigma", "Σ": "sum", "×": "x", "…": "...", "·": "-", "→": "->", "←": "<-",
    "—": "--", "–": "-", "−": "-", "±": "+-", "≤": "<=", "≥": ">=", "≈": "~", "‖": "||", "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
"""What our own words and figures hold beyond ASCII. Characters of tables are lines."""
_PLAIN = "specalign_plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(map(_in_ascii, lacking)), error.end


def _in_ascii(character: str) -> str:
    if "\u2500" <= character <= "\u257f":
        return {"─": "-", "━": "-", "│": "|", "┃": "|"}.get(character, "+")
    return _LETTERS.get(character) or character.encode("ascii", "backslashreplace").decode()


codecs.register_error(_PLAIN, _plain)


def encodable(text: str, encoding: str | None) -> str:
    """The text with what the encoding lacks (None: UTF-8) in plain letters, or as an escape."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, _PLAIN).decode(encoding)


def open_streams() -> None:
    """From now on all three streams are there and no text fails on its encoding: what is written to a closed one goes nowhere, and no
    file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is this one
            os.open(os.devnull, os.O_RDWR)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_PLAIN)


def unread() -> bool:
    """Whether standard output or error is a pipe that nobody reads any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # no file of the system's, or closed
            asked = select.poll()
            asked.register(stream.fileno(), select.POLLOUT)
            if any(state & (select.POLLERR | select.POLLHUP) for _, state in asked.poll(0)):
                return True
    return False


def close_output() -> None:
    """Where standard output or error can't be written, what is left for it goes nowhere: the interpreter would fail over it at its
    end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
