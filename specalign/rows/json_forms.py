"""Reads the rows of a JSON file: lines, a list, one object, columns, or rows under a key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import read_lines, read_text
from specalign.common.text import say_once
from specalign.rows.messages import has_role, is_conversation, is_message
from specalign.rows.shapes import CONVERSATIONS, PROMPT_COLUMNS
from specalign.rows.splits import NoSplit, split_of

EVERY = "*"
"""As `under` of `json_rows`: the rows under all keys."""


def json_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Any]:
    """The rows of a JSON file, whatever its ending: one value a line (memory holds one line), else
    a single value, which may be a list of rows, a row, columns, or rows under a key.

    Args:
        under: the key to read if several hold rows; `EVERY` = all of them.
        under_key: as in `specalign.rows.tables.read_rows`.

    Raises:
        UserError: broken content, with its line; several keys hold rows and none is `under`.
    """
    lines = ((n, line) for n, line in enumerate(read_lines(path), 1) if line.strip())
    number, first = next(lines, (0, ""))
    if not first:
        return
    try:
        values = chain([_parse(first, path, number)], (_parse(s, path, n) for n, s in lines))
        is_table = ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]
    except UserError:  # a value over several lines
        values = chain([_parse(read_text(path).removeprefix("\ufeff"), path, 1)])
        is_table = True
    start = list(islice(values, 2))
    if len(start) == 1 and (is_table or isinstance(start[0], list)):
        yield from find_rows(start[0], str(path), under, under_key)
    else:
        yield from chain(start, values)


def _parse(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno - 1}"
        why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise UserError(f"{place}: not JSON ({why})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {line}: not JSON that can be read ({error})") from None


def find_rows(
    value: Any, where: str, under: str | None = None, under_key: str | None = None
) -> list[Any]:
    """The rows in a JSON value. Raises UserError as `json_rows` does."""
    if isinstance(value, list):
        return [value] if value and all(map(is_message, value)) else value
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: expected a list of rows or an object, found {type(value).__name__}"
        )
    tables = {key: rows for key, item in value.items() if (rows := _table(item))}
    if _is_row(value):
        return [value]
    if not tables:
        return _transpose(value) or [value]
    if under == EVERY:
        return [row for rows in tables.values() for row in rows]
    key = under if under is not None and under in tables else str(next(iter(tables)))
    if len(tables) > 1 and key != under:
        option = f", or choose one ({under_key})" if under_key else ""
        raise UserError(
            f"{where}: holds rows under several keys ({', '.join(tables)}): keep one of "
            f"them{option}"
        )
    known = split_of(Path(under or ""))
    if known and split_of(Path(key)) not in (known, None):
        raise NoSplit(f"{where}: no split {under!r}{nearest(str(under), [key])}")
    unused = [k for k, item in value.items() if k != key and item not in (None, "", [], {})]
    if unused and under_key is not None:
        say_once(f"note: {where}: reads the rows under {key!r}; not used: {', '.join(unused)}")
    return tables[key]


def _is_row(value: dict[str, Any]) -> bool:
    """Whether an object is one row: it has a prompt."""
    columns = {str(name).casefold(): item for name, item in value.items()}
    if is_message(value) or any(isinstance(columns.get(name), str) for name in PROMPT_COLUMNS):
        return True
    turns = [columns.get(name) for name in (*CONVERSATIONS, "turns", "prompt")]
    talks = [items for items in turns if isinstance(items, list) and items]
    return any(all(map(has_role, items)) for items in talks) or any(
        map(is_conversation, value.values())
    )


def _transpose(value: dict[str, Any]) -> list[Any]:
    """The rows of a table stored by columns: lists of one length, or values by row number
    (pandas)."""
    columns = list(value.values())
    if columns and all(isinstance(c, dict) and all(map(str.isdigit, c)) for c in columns):
        numbers = dict.fromkeys(number for column in columns for number in column)
        return [{name: column.get(n) for name, column in value.items()} for n in numbers]
    if not all(isinstance(column, list) for column in columns) or len({*map(len, columns)}) != 1:
        return []
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]


def _table(value: Any) -> list[Any]:
    """The rows in a list of objects, or in an object of objects by name; none in anything else."""
    rows = list(value.values()) if isinstance(value, dict) else value
    is_table = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return rows if is_table else []
