"""Values as people read them."""

from __future__ import annotations


def clock(seconds: float) -> str:
    """Minutes and seconds, 3:07; hours in front from one hour on, 1:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(text: str, most: int = 40) -> str:
    """The text, cut to so many characters."""
    return text if len(text) <= most else text[: most - 3] + "…"
