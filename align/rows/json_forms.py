"""Rows of a JSON file in any form: lines, a list, one object, columns, rows under a key."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.common.files import read_lines, read_text
from align.common.text import plural, say_once
from align.rows.messages import has_known_role, has_role, is_message
from align.rows.shapes import CONVERSATIONS, PROMPT_COLUMNS
from align.rows.splits import NoSplit, split_of

EVERY = "*"
"""As `under` of `json_rows`: the rows under all keys."""


def json_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Any]:
    """The rows of a JSON file, whatever its ending: one value a line (memory holds one line); else
    values over several lines. A file that holds one value only may be a list of rows, one row,
    columns, or rows under a key.

    Args:
        under: which key to read where several hold rows; `EVERY` = all of them.
        under_key: as in `align.rows.tables.read_rows`.

    Raises:
        UserError: broken content, with its line; several keys that hold rows, and none of them is
            `under`.
    """
    lines = ((number, line) for number, line in enumerate(read_lines(path), 1) if line.strip())
    if (first := next(lines, None)) is None:
        return
    named_json = ".json" in [suffix.lower() for suffix in path.suffixes[-2:]]
    try:
        value = _loads(first[1], path, first[0])
    except UserError as error:
        yield from _over_lines(path, under, under_key, None if named_json else error)
        return
    second = next(lines, None)
    if second is not None:
        yield value
        yield from (_loads(line, path, number) for number, line in chain([second], lines))
    elif isinstance(value, dict) and not named_json:
        yield value
    else:
        yield from rows_of(value, str(path), under, under_key)


def _loads(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {line}: not JSON ({_describe(error)})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {line}: not JSON that can be read ({error})") from None


def _describe(error: json.JSONDecodeError) -> str:
    """What is wrong and in which column. Some of the parser's messages end in "at"."""
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"


def _over_lines(
    path: Path, under: str | None, under_key: str | None, of_line: UserError | None
) -> Iterator[Any]:
    """The rows of a file in which a value takes several lines. of_line: what is wrong with its
    first line by itself, which is what is raised for a file in lines."""
    values = _values(path, of_line)
    value, second = next(values), next(values, _END)
    if second is _END:
        yield from rows_of(value, str(path), under, under_key)
    else:
        yield from chain([value, second], values)


_END = object()


def _values(path: Path, of_line: UserError | None) -> Iterator[Any]:
    decoder, place, found = json.JSONDecoder(), 0, False
    try:
        text = read_text(path).replace("\ufeff", "")
        while rest := re.compile(r"\S").search(text, place):
            value, place = decoder.raw_decode(text, rest.start())
            found = True
            yield value
    except (ValueError, RecursionError) as error:
        if of_line is not None and not found:
            raise of_line from None
        if isinstance(error, UserError):
            raise
        if isinstance(error, json.JSONDecodeError):
            raise UserError(f"{path}, line {error.lineno}: not JSON ({_describe(error)})") from None
        raise UserError(f"{path}: not JSON that can be read ({error})") from None


def rows_of(value: Any, where: str, under: str | None = None, under_key: str | None = None) -> list[Any]:
    """The rows in a JSON value. Raises UserError as `json_rows` does."""
    if isinstance(value, list):
        return [value] if value and all(map(is_message, value)) else value
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a list of rows or an object, found {type(value).__name__}")
    if _is_row(value):
        return [value]
    if rows := _rows_of_split(value) or _rows_of_columns(value):
        return rows
    tables = {
        key: rows for key, held in value.items() if (rows := _table(held) or _rows_of_named_split(key, held))
    }
    nested = [
        key for key, held in value.items() if isinstance(held, dict) and any(map(_is_table, held.values()))
    ]
    if not tables and len(nested) == 1:
        _note_others(value, nested, {}, where, under_key)
        return rows_of(value[nested[0]], where, under, under_key)
    if under is not None and under in tables:
        rows = tables.pop(under)
        _note_others(value, [under], tables, where, under_key)
        return [value[under]] if _is_talk(value[under]) else rows
    if len(tables) > 1 and under != EVERY:
        option = f", or choose one ({under_key})" if under_key else ""
        raise UserError(
            f"{where}: holds rows under several keys ({', '.join(tables)}): keep one of them{option}"
        )
    if any(map(_is_talk, value.values())):
        return [value]
    _check_split(list(tables), where, under)
    _note_others(value, tables, {}, where, under_key)
    rows = [row for table in tables.values() for row in table]
    return rows or _table(value) or [value]


def _note_others(
    value: dict[str, Any],
    read: Collection[str],
    tables: dict[str, list[Any]],
    where: str,
    under_key: str | None,
) -> None:
    """Print a note on the keys of an object that are not read. tables: those that hold rows."""
    others = [key for key, held in value.items() if key not in read and held not in (None, "", [], {})]
    if not read or not others or under_key is None:
        return
    shown = [f"{key} ({plural(len(tables[key]), 'row')})" if key in tables else key for key in others]
    option = f" ({under_key} chooses the key)" if tables and under_key else ""
    say_once(
        f"note: {where}: reads the rows under {', '.join(map(repr, read))}; not used: {', '.join(shown)}{option}"
    )


def _is_talk(value: Any) -> bool:
    """Whether a value is a list of messages, not rows that have a role among their columns."""
    return isinstance(value, list) and all(map(is_message, value)) and any(map(has_known_role, value))


def _check_split(keys: list[str], where: str, wanted: str | None) -> None:
    """Raises NoSplit where the only key that holds rows names another split than the wanted one."""
    found = split_of(Path(keys[0])) if len(keys) == 1 else None
    known = split_of(Path(wanted or ""))
    if found and known and found != known:
        raise NoSplit(f"{where}: no split {wanted!r}{nearest(str(wanted), keys)}")


def _is_row(value: dict[str, Any]) -> bool:
    """Whether an object is one row: it has a prompt."""
    columns = {str(name).casefold(): held for name, held in value.items()}
    spoken = [columns.get(name) for name in (*CONVERSATIONS, "turns", "prompt")]
    if is_message(value) or any(isinstance(columns.get(name), str) for name in PROMPT_COLUMNS):
        return True
    turns = [columns.get(name) for name in (*CONVERSATIONS, "turns")]
    return any(isinstance(talk, list) and talk and all(map(has_role, talk)) for talk in spoken) or any(
        isinstance(talk, list) and talk and all(isinstance(turn, str) for turn in talk) for talk in turns
    )


def _table(value: Any) -> list[Any]:
    """The rows in a list of objects, or in an object of objects by name; none in anything else."""
    rows = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return []
    return rows


def _rows_of_named_split(key: str, value: Any) -> list[Any]:
    """The rows under the name of a split: one row, or a table by columns."""
    if not isinstance(value, dict) or split_of(Path(key)) is None:
        return []
    return _rows_of_columns(value) or ([value] if _is_row(value) else [])


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(_table(value))


def _rows_of_split(value: dict[str, Any]) -> list[Any]:
    """The rows of what pandas writes with orient="split"."""
    names, data = value.get("columns"), value.get("data")
    if {*value} - {"index"} != {"columns", "data"} or not isinstance(names, list):
        return []
    if not isinstance(data, list) or not all(isinstance(row, list) for row in data):
        return []
    return [dict(zip(map(str, names), row, strict=False)) for row in data]


def _rows_of_columns(value: dict[str, Any]) -> list[Any]:
    """The rows of a table that is kept by columns: lists of one length, or values by the number of
    their row (pandas). Columns of objects alone are tables themselves."""
    columns = list(value.values())
    if not columns or all(map(_table, columns)):
        return []
    if all(isinstance(column, dict) and all(key.isdigit() for key in column) for column in columns):
        numbers = dict.fromkeys(number for column in columns for number in column)
        return [{name: column.get(number) for name, column in value.items()} for number in numbers]
    if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) != 1:
        return []
    return [dict(zip(value, row, strict=True)) for row in zip(*columns, strict=True)]
