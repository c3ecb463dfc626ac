"""Names of methods, as they are written in options, records and tables."""

from __future__ import annotations

from collections.abc import Mapping

PLAIN = "plain"


LOSSY = "lossy"
"""What the names of verifiers begin with that do not keep the target's law."""


def written(name: str, options: Mapping[str, str]) -> str:
    """A method as it is written, `name:key=value:…`."""
    return ":".join([name, *(f"{key}={value}" for key, value in options.items())])
