"""Values and times as text, and printing."""

import functools
import html
import logging
import re
import sys
import warnings
from collections.abc import Iterable, Sequence

# C0 but tab and newline, DEL, C1, line separators, bidirectional marks, halves of surrogates
_CONTROL = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
    "|\r(?!\n)"
)


def printable(text: str) -> str:
    """The text with control characters as escapes: it can't control a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def markdown_text(text: str) -> str:
    """The text escaped for a line or a table cell of Markdown."""
    plain = html.escape(" ".join(printable(text).split()), quote=False)
    return plain.replace("|", "\\|").replace("](", "]\\(").replace("`", "\\`")


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with escaped cells."""
    lines = ["| " + " | ".join(map(markdown_text, row)) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def say(text: str = "", end: str = "\n", error: bool = False) -> None:
    """Print what a terminal can show; `error`: to standard error."""
    print(printable(text), end=end, file=sys.stderr if error else sys.stdout, flush=True)


@functools.cache
def say_once(text: str) -> None:
    """Print to standard error a note that this process has not printed before."""
    say(text, error=True)


def cut(text: str, length: int) -> str:
    """The text, its end replaced by `…` where it is longer than `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}…"


def format_title(spec: str, weights: str | None) -> str:
    """A target in a title, with what stands in for its weights."""
    return f"{spec} ({weights})" if weights else spec


def plural(count: int, word: str) -> str:
    """`1 prompt`, `2 prompts`."""
    return f"{count} {word}{'s' * (count != 1)}"


def short(value: object, length: int = 80) -> str:
    """A value as Python writes it, cut to `length` characters."""
    return cut(repr(value), length)


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


_DEPRECATED = "past_key_values"
"""A name that models use and that transformers warns about."""


@functools.cache
def quiet_libraries() -> None:
    """Drop warnings that no user can act on."""
    warnings.filterwarnings("ignore", message=f".*{_DEPRECATED}", category=FutureWarning)
    logger = logging.getLogger("transformers.utils.generic")
    logger.addFilter(lambda record: _DEPRECATED not in str(record.msg))
