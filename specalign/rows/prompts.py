"""Reads conversations out of rows. What is left out is counted and reported once per source."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from specalign.common.errors import UserError, nearest
from specalign.common.text import plural, say
from specalign.rows.conversation import Conversation, UnusableRow
from specalign.rows.shapes import PROMPT_COLUMNS, parse_row


class PromptRow(NamedTuple):
    """A conversation with its row's id (default: its number, from 1) and category."""

    conversation: Conversation
    id: str
    category: str


def read_prompt_rows(
    rows: Iterable[object], where: str, column: str | None, column_key: str
) -> list[PromptRow]:
    """The conversations of all rows that have one; one note reports what is left out. Raises
    UserError for no rows, no such column, or no usable row.

    Args:
        where: the source, as messages begin: `data.prompts='x.jsonl'`.
        column: that holds the prompts; None = the first of `PROMPT_COLUMNS` that does.
        column_key: the option that chooses the column.
    """
    found: list[PromptRow] = []
    all_columns: dict[str, None] = {}
    skipped, unused = Counter[str](), Counter[str]()
    number, answered, later_turns = 0, 0, 0
    for number, row in enumerate(rows, 1):
        columns = row if isinstance(row, dict) else {}
        all_columns |= dict.fromkeys(map(str, columns))
        try:
            parsed = parse_row(row, column)
        except UnusableRow as error:
            skipped[str(error)] += 1
            continue
        unused.update(parsed.columns)
        answered += parsed.answered
        later_turns += parsed.later_turns
        ids = [columns[name] for name in ("id", "prompt_id") if columns.get(name) is not None]
        category = columns.get("category")
        name = str(ids[0] if ids else number)
        found.append(
            PromptRow(parsed.conversation, name, "" if category is None else str(category))
        )
    reasons = _join_counts(skipped, "{count} {name}")
    if not found:
        if not number:
            raise UserError(f"{where} contains no rows")
        raise UserError(f"{where}: {_explain_failure([*all_columns], reasons, column, column_key)}")
    notes = []
    if skipped:
        notes.append(f"{skipped.total()} of {plural(number, 'row')} skipped ({reasons})")
    if answered:
        ending = plural(answered, "row")
        notes.append(f"the final answers of {ending} are dropped: the target generates its own")
    if later_turns:
        turns = plural(later_turns, "later turn")
        notes.append(f"{turns} skipped (a list of messages keeps them)")
    if unused:
        listed = _join_counts(unused, "{name} ({count})")
        notes.append(f"columns not used: {listed} ({column_key} chooses the column)")
    if notes:
        say(f"note: {where}: {'; '.join(notes)}", error=True)
    return found


def _join_counts(counts: Counter[str], form: str) -> str:
    """The most common names with their counts."""
    shown = [form.format(name=name, count=count) for name, count in counts.most_common(12)]
    return ", ".join(shown) + ", …" * (len(counts) > 12)


def _explain_failure(columns: list[str], reasons: str, column: str | None, column_key: str) -> str:
    if column is not None and columns and column not in columns:
        return f"no column {column!r}{nearest(column, columns)}"
    listed = ", ".join(columns[:12]) + ", …" * (len(columns) > 12)
    known = {name.strip().casefold() for name in columns} & {*PROMPT_COLUMNS, "role", "from"}
    if columns and column is None and not known:
        return f"no prompt among its columns ({listed}) ({column_key} chooses one)"
    columns_note = f"; its columns: {listed}" if columns else ""
    return f"no row contains a prompt ({reasons}){columns_note}"
