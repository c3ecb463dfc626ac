"""Reads conversations out of rows. What is left out is counted and reported once per source."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specalign.common.errors import UserError, nearest
from specalign.common.text import plural, say
from specalign.rows.conversation import Conversation
from specalign.rows.messages import UnusableRow
from specalign.rows.shapes import PROMPT_COLUMNS, ParsedRow, parse_row

_LISTED_COLUMNS = 12
_LISTED_REASONS = 6


class PromptRow(NamedTuple):
    """A conversation with its row's id (default: its number, from 1) and category."""

    conversation: Conversation
    id: str
    category: str


@dataclass
class _Counts:
    """What was read of a source, and what was left out."""

    rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    later_turns: int = 0
    answered: int = 0
    split: int = 0

    def add(self, parsed: ParsedRow) -> None:
        self.unused.update(parsed.columns)
        self.unused_keys.update(parsed.keys)
        self.later_turns += parsed.later_turns
        self.answered += parsed.answered
        self.split += parsed.split

    def list_reasons(self) -> str:
        """Why rows were skipped, most common first."""
        common = self.skipped.most_common(_LISTED_REASONS)
        rest = self.skipped.total() - sum(count for _, count in common)
        others = [f"{rest} for other reasons"] if rest else []
        return ", ".join([f"{count} {reason}" for reason, count in common] + others)


def read_prompt_rows(
    rows: Iterable[Any], where: str, column: str | None, column_key: str, quiet: bool = False
) -> list[PromptRow]:
    """The conversations of all rows that have one; one note reports what is left out.

    Args:
        where: the source, as messages begin: `data.prompts='x.jsonl'`.
        column: that holds the prompts; None = the first of `PROMPT_COLUMNS` that does.
        column_key: the option that chooses the column.

    Raises:
        UserError: no rows, no such column, or no usable row.
    """
    counts = _Counts()
    found: list[PromptRow] = []
    for row in rows:
        counts.rows += 1
        columns = row if isinstance(row, dict) else {}
        counts.columns.update(dict.fromkeys(map(str, columns)))
        try:
            parsed = parse_row(row, column)
        except UnusableRow as error:
            counts.skipped[str(error)] += 1
            continue
        counts.add(parsed)
        ids = [columns[name] for name in ("id", "prompt_id") if columns.get(name) is not None]
        category = columns.get("category")
        name = str(ids[0] if ids else counts.rows)
        found.append(
            PromptRow(parsed.conversation, name, "" if category is None else str(category))
        )
    if not found:
        raise UserError(_explain_failure(counts, where, column, column_key))
    note = _describe_losses(counts, column_key)
    if note and not quiet:
        say(f"note: {where}: {note}", error=True)
    return found


def _describe_losses(counts: _Counts, column_key: str) -> str:
    parts = []
    if counts.skipped:
        total, rows = counts.skipped.total(), plural(counts.rows, "row")
        parts.append(f"{total} of {rows} skipped ({counts.list_reasons()})")
    if counts.answered:
        rows = plural(counts.answered, "row")
        parts.append(f"the answers that end {rows} are left out: the target writes its own")
    if counts.split:
        rows = plural(counts.split, "row")
        parts.append(f"{rows} split into turns at their marks Human: and Assistant:")
    if counts.later_turns:
        turns = plural(counts.later_turns, "later turn")
        parts.append(f"{turns} left out (a list of messages keeps them)")
    if counts.unused:
        columns = _list_columns(counts.unused)
        parts.append(f"columns not used: {columns} ({column_key} chooses the column)")
    if counts.unused_keys:
        parts.append(f"keys of messages not used: {_list_columns(counts.unused_keys)}")
    return "; ".join(parts)


def _list_columns(columns: Counter[str]) -> str:
    shown = [f"{name} ({count})" for name, count in columns.most_common(_LISTED_COLUMNS)]
    more = len(columns) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _explain_failure(counts: _Counts, where: str, column: str | None, column_key: str) -> str:
    columns = list(counts.columns)
    if not counts.rows:
        return f"{where} holds no rows"
    if column is not None and columns and column not in columns:
        return f"{where}: no column {column!r}{nearest(column, columns)}"
    listed = ", ".join(columns[:_LISTED_COLUMNS]) + ", …" * (len(columns) > _LISTED_COLUMNS)
    known = {name.strip().casefold() for name in columns} & {*PROMPT_COLUMNS, "role", "from"}
    if columns and column is None and not known:
        close = [c for c in columns if difflib.get_close_matches(c.casefold(), PROMPT_COLUMNS, 1)]
        hint = f"did you mean {column_key}={close[0]}?" if close else f"{column_key} chooses one"
        return f"{where}: no prompt among its columns ({listed}) ({hint})"
    columns_note = f"; its columns: {listed}" if columns else ""
    return f"{where}: no row holds a prompt ({counts.list_reasons()}){columns_note}"
