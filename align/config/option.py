"""A key of the recipe: a dataclass's field with its documentation and its limits."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any


def option(
    default: Any,
    doc: str,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    prose: bool = False,
) -> Any:
    """A field with its documentation; its numbers (of a list too) lie in [low, high] and above `above`. `prose`: a text of lines."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "prose": prose}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Group:
    """A part of the recipe; knows how to check its own numbers."""

    def problem(self, prefix: str) -> str | None:
        """The first impossible value, as `key=value must …`, or None."""
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, str) and not value.isprintable() and not f.metadata["prose"]:
                return f"{prefix}{f.name}={value!r} must not hold control characters"
            for number in _numbers(value):
                limit = _limit(number, f.metadata)
                if limit:
                    return f"{prefix}{f.name}={value} must be {limit}"
        return None


def _numbers(value: Any) -> list[float]:
    entries = (
        list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    )
    return [v for v in entries if isinstance(v, int | float) and not isinstance(v, bool)]


MOST = 2**53
"""No number of a recipe is larger, or further below zero."""


def _limit(number: float, metadata: Any) -> str | None:
    if not math.isfinite(number):
        return "a finite number"
    if abs(number) > MOST:
        return f"at most {MOST}"
    if metadata.get("above") is not None and not number > metadata["above"]:
        return f"greater than {metadata['above']:.12g}"
    if metadata.get("low") is not None and number < metadata["low"]:
        return f"at least {metadata['low']:.12g}"
    if metadata.get("high") is not None and number > metadata["high"]:
        return f"at most {metadata['high']:.12g}"
    return None
