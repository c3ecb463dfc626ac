"""Values and times as text."""

from __future__ import annotations


def cut(text: str, length: int) -> str:
    """The text, its end replaced by `…` where it is longer than `length` characters."""
    return text if len(text) <= length else f"{text[: length - 3]}…"


def short(value: object, length: int = 80) -> str:
    """A value as Python writes it, cut to `length` characters."""
    return cut(repr(value), length)


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
