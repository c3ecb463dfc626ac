"""The keys of a recipe: dataclass fields with documentation and limits, in sections that validate
themselves."""

from __future__ import annotations

import math
from dataclasses import field, fields
from typing import Any, ClassVar

from specalign.common.errors import UserError

LARGEST = 2**53
"""Limit of every number in a recipe, in either direction."""


def option(
    default: object,
    doc: str,
    low: float = -LARGEST,
    high: float = LARGEST,
    above: float | None = None,
    prose: bool = False,
) -> Any:
    """A field with its documentation.

    Args:
        low, high, above: limits of the number, or of each number in a list or mapping; `above`
            excludes the limit itself.
        prose: the text may have several lines.
    """
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "prose": prose}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: object, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


class Section:
    """A section of the recipe. Creating one with an impossible value raises UserError, which names
    the key."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        prefix = f"{self.SECTION}." if self.SECTION else ""
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if isinstance(value, str) and not f.metadata["prose"]:
                message = f"{prefix}{f.name}={value!r} must not contain control characters"
                require(value.isprintable(), message)
            for number in _list_numbers(value):
                limit = _exceeded_limit(number, **f.metadata)
                require(limit is None, f"{prefix}{f.name}={value} must be {limit}")
        self.validate()

    def validate(self) -> None:
        """Check what no single number shows. Raises UserError."""


def _list_numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    entries = value if isinstance(value, list) else [value]
    return [v for v in entries if isinstance(v, int | float) and not isinstance(v, bool)]


def _exceeded_limit(
    number: float, low: float, high: float, above: float | None, **other: object
) -> str | None:
    if not math.isfinite(number):
        return "a finite number"
    if above is not None and number <= above:
        return f"greater than {above:.12g}"
    if number < low:
        return f"at least {low:.12g}"
    if number > high:
        return f"at most {high:.16g}"
    return None
