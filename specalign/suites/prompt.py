"""Prompts and suites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specalign.common.schema import JsonObject
from specalign.rows.conversation import Conversation

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Prompt:
    """One request to the target. `content`: the user's text, or messages with role and content, or
    these with tools."""

    id: str
    content: str | list[JsonObject] | Conversation
    category: str = ""


@dataclass(frozen=True)
class Place:
    """A benchmark's Hub id, configuration and split, and the package that replaces it without the
    Hub. `under`: the key of its rows in a JSON file that holds others too."""

    hub: str | None = None
    config: str | None = None
    split: str = "test"
    package: str | None = None
    version: str = ""
    member: str = ""
    under: str | None = None


@dataclass(frozen=True)
class Suite:
    """A benchmark: where its rows are, and how to read one.

    read: the prompt of a row and its number, or None for a row of another benchmark in the same
        file; raises KeyError for a missing column.
    package_note: which part of the benchmark the package holds, for the report.
    rows: of a suite that this project ships.
    """

    name: str
    title: str
    group: str
    read: Callable[[Row, int], Prompt | None]
    place: Place = Place()
    package_note: str = ""
    rows: Sequence[Row] = ()
