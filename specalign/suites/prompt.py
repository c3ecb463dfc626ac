"""Prompts and suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specalign.rows.conversation import Conversation
from specalign.suites.places import Place

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request to the target. `content`: the user's text, or messages with role and content, or
    these with tools."""

    id: str
    content: str | list[dict[str, Any]] | Conversation
    category: str = ""


@dataclass(frozen=True)
class Suite:
    """A benchmark: where its rows are, and how to read one.

    `read` returns the prompt of a row and its number, or None for a row of another benchmark in the
    same file. It raises KeyError for a missing column.
    """

    name: str
    title: str
    group: str
    read: Callable[[Row, int], Prompt | None]
    place: Place = Place()
    package_note: str = ""
    """Which part of the benchmark the package holds, for the report."""
    rows: Sequence[Row] = ()
    """Of a suite that this project ships."""


def text(row: Row, *columns: str) -> str:
    """The text of the first of `columns` with any, stripped. Raises KeyError(first column) if there
    is none."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise KeyError(columns[0])


def _read_own(row: Row, number: int) -> Prompt:
    return Prompt(row["id"], text(row, "prompt"), row["category"])


def own_suite(name: str, title: str, prompts: Mapping[str, Sequence[str]]) -> Suite:
    """A suite of prompts that this project ships, by category."""
    rows = [
        {"id": f"{name}-{category}-{number}", "category": category, "prompt": prompt}
        for category, own in prompts.items()
        for number, prompt in enumerate(own, 1)
    ]
    return Suite(name, title, "mixed", _read_own, rows=rows)
