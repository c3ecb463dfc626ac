"""What a suite is made of: prompts, and where its rows live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request to the target: `content` is the user's text, or a whole conversation of role/content
    messages.
    """

    id: str
    content: str | list[dict[str, str]]
    category: str = ""


@dataclass(frozen=True)
class Suite:
    """One benchmark: its real hub id, the registry package that stands in without a hub, and how a row
    becomes a prompt.

    `read` takes a row and its number and returns the prompt, or None for a row that belongs to another
    benchmark of the same file. It raises KeyError for a column that the row lacks.
    """

    name: str
    title: str
    group: str
    read: Callable[[Row, int], Prompt | None]
    hub: str | None = None
    config: str | None = None
    split: str = "test"
    package: str | None = None
    version: str = ""
    member: str = ""
    package_note: str = ""
    """What part of the benchmark the package holds, for the report."""


def text(row: Row, *columns: str) -> str:
    """The first of `columns` that holds text, stripped. Raises KeyError(first column) when none does."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise KeyError(columns[0])
