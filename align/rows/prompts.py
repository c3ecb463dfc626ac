"""Conversations out of rows: what is left out is counted and told in one note for each source."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from align.common.errors import UserError, nearest
from align.common.text import plural, say
from align.rows.conversation import Conversation
from align.rows.messages import UnusableRow
from align.rows.shapes import PROMPT_COLUMNS, parse_row
from align.rows.tables import collect

_SHOWN = 12
"""Columns that a note or an error names."""


_REASONS = 6


class PromptRow(NamedTuple):
    """A conversation with its row's id (its number, from 1 on, where it has none) and category."""

    conversation: Conversation
    id: str
    category: str


@dataclass
class _Account:
    """What was read of a source, and what of it was left out."""

    rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    unused: Counter[str] = field(default_factory=Counter)
    unused_keys: Counter[str] = field(default_factory=Counter)
    later_turns: int = 0
    answered: int = 0
    remarks: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


def read_prompt_rows(
    rows: Iterable[Any], where: str, column: str | None, column_key: str, quiet: bool = False
) -> list[PromptRow]:
    """The conversations of all rows that have one; one note tells what is left out.

    Args:
        where: the source, as messages begin: `data.prompts='x.jsonl'`.
        column: that holds the prompts; None: the first of `PROMPT_COLUMNS` that does.
        column_key: the option that chooses the column.
        quiet: without the note.

    Raises:
        UserError: no rows, no such column, or no row that can be used.
    """
    account = _Account()
    found = collect(_parsed(rows, column, account), where, _bytes_of)
    if not found:
        raise UserError(_complaint(account, where, column, column_key))
    if not quiet and (note := _note(account, column_key)):
        say(f"note: {where}: {note}", error=True)
    return found


def _bytes_of(row: PromptRow) -> int:
    return sum(len(message["content"]) + 100 for message in row.conversation.messages)


def _parsed(rows: Iterable[Any], column: str | None, account: _Account) -> Iterable[PromptRow]:
    for row in rows:
        account.rows += 1
        held = row if isinstance(row, dict) else {}
        account.columns.update(dict.fromkeys(map(str, held)))
        try:
            parsed = parse_row(row, column)
        except UnusableRow as error:
            account.skipped[str(error)] += 1
            continue
        account.unused.update(parsed.columns)
        account.unused_keys.update(parsed.keys)
        account.later_turns += parsed.later_turns
        account.answered += parsed.answered
        account.remarks.update(parsed.remarks)
        names = [held[name] for name in ("id", "prompt_id") if held.get(name) is not None]
        category = held.get("category")
        yield PromptRow(
            parsed.conversation,
            str(names[0] if names else account.rows),
            "" if category is None else str(category),
        )


def _note(account: _Account, column_key: str) -> str:
    parts = []
    if account.skipped:
        reasons = _reasons(account)
        parts.append(f"{account.skipped.total()} of {plural(account.rows, 'row')} skipped ({reasons})")
    if account.answered:
        rows = plural(account.answered, "row")
        parts.append(f"the answers that end {rows} are left out: the target writes its own")
    parts += [f"{plural(count, 'row')} {remark}" for remark, count in account.remarks.items()]
    if account.later_turns:
        turns = plural(account.later_turns, "later turn")
        parts.append(f"{turns} left out (a list of messages keeps them)")
    if account.unused:
        parts.append(f"columns not used: {_listed(account.unused)} ({column_key} chooses the column)")
    if account.unused_keys:
        parts.append(f"keys of messages not used: {_listed(account.unused_keys)}")
    return "; ".join(parts)


def _reasons(account: _Account) -> str:
    common = account.skipped.most_common(_REASONS)
    rest = account.skipped.total() - sum(count for _, count in common)
    return ", ".join(f"{count} {why}" for why, count in common) + (
        f", {rest} for other reasons" if rest else ""
    )


def _listed(columns: Counter[str]) -> str:
    """Columns with the number of rows in which they hold something."""
    shown = [f"{name} ({count})" for name, count in columns.most_common(_SHOWN)]
    return ", ".join(shown) + (f" and {len(columns) - _SHOWN} more" if len(columns) > _SHOWN else "")


def _complaint(account: _Account, where: str, column: str | None, column_key: str) -> str:
    """Why a source gives no prompt."""
    columns = list(account.columns)
    if not account.rows:
        return f"{where} holds no rows"
    if column is not None and columns and column not in columns:
        return f"{where}: no column {column!r}{nearest(column, columns)}"
    listed = ", ".join(columns[:_SHOWN]) + (", …" if len(columns) > _SHOWN else "")
    known = {name.strip().casefold() for name in columns} & {*PROMPT_COLUMNS, "role", "from"}
    if columns and column is None and not known:
        close = [name for name in columns if difflib.get_close_matches(name.casefold(), PROMPT_COLUMNS, 1)]
        hint = f" (did you mean {column_key}={close[0]}?)" if close else f" ({column_key} chooses one)"
        return f"{where}: no prompt among its columns ({listed}){hint}"
    held = f"; its columns: {listed}" if columns else ""
    return f"{where}: no row holds a prompt ({_reasons(account)}){held}"
