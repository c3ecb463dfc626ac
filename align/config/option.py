"""Keys of a recipe: dataclass fields with documentation and limits, in sections that validate
themselves."""

import math
from dataclasses import field, fields
from typing import Any

from specalign.common.errors import UserError

LARGEST = 2**53  # limit of every number in a recipe, in either direction


def option(
    default: object,
    doc: str,
    low: float = -LARGEST,
    high: float = LARGEST,
    above: float = -math.inf,
    prose: bool = False,
) -> Any:
    """A field with its documentation. The limits hold for each number of a list or mapping; `above`
    itself is excluded. `prose` may have several lines."""
    metadata = {"doc": doc, "low": low, "high": high, "above": above, "prose": prose}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def require(condition: object, message: str) -> None:
    """Raise UserError with the message unless the condition holds."""
    if not condition:
        raise UserError(message)


class Section:
    """A section of the recipe. An impossible value raises UserError, which names its key."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            given = f"{section}.{f.name}={value!r}".removeprefix("recipe.")
            if isinstance(value, str) and not f.metadata["prose"]:
                require(value.isprintable(), f"{given} must not contain control characters")
            entries = [*value.values()] if isinstance(value, dict) else value
            for number in entries if isinstance(entries, list) else [entries]:
                if type(number) in (int, float):
                    low, high, above = (f.metadata[name] for name in ("low", "high", "above"))
                    require(number > above, f"{given} must be greater than {above}")
                    require(number >= low, f"{given} must be at least {low}")
                    require(number <= high, f"{given} must be at most {high}")
        self.validate()

    def validate(self) -> None:
        """Check what no single number shows. Raises UserError."""
