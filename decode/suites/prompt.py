"""What a suite is made of: prompts, and where its rows live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from align.benchmarks.places import Place
from align.rows.conversation import Conversation

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request to the target. `content`: the user's text, or messages with role and content, or these with tools."""

    id: str
    content: str | list[dict[str, Any]] | Conversation
    category: str = ""


@dataclass(frozen=True)
class Suite:
    """One benchmark: where its rows live, and how to read one.

    `read` takes a row and its number and returns the prompt, or None for a row of another benchmark in the same file. It
    raises KeyError for a column that the row lacks.
    """

    name: str
    title: str
    group: str
    read: Callable[[Row, int], Prompt | None]
    place: Place = Place()
    package_note: str = ""
    """Which part of the benchmark the package holds, for the report."""
    rows: Sequence[Row] = ()
    """Those of a suite that is part of this project."""


def text(row: Row, *columns: str) -> str:
    """The text of the first of `columns` that holds some, stripped. Raises KeyError(first column) where none does."""
    for column in columns:
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            return value.strip()
    raise KeyError(columns[0])


def _own(row: Row, number: int) -> Prompt:
    """A row of `own_suite`."""
    return Prompt(row["id"], text(row, "prompt"), row["category"])


def own_suite(name: str, title: str, prompts: Mapping[str, Sequence[str]]) -> Suite:
    """A suite of prompts that were written for this project, by category."""
    rows = [
        {"id": f"{name}-{category}-{number}", "category": category, "prompt": prompt}
        for category, own in prompts.items()
        for number, prompt in enumerate(own, 1)
    ]
    return Suite(name, title, "mixed", _own, rows=rows)
