"""Reads the rows of one local file: JSON (lines, a list, one object, or rows under a key), CSV,
Parquet, Arrow, or text with one row a line."""

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import MOST_BYTES, PACKED, check_ordinary, read_lines, read_text
from specalign.common.text import say_once
from specalign.rows.conversation import decode_json, has_role, is_conversation, is_message
from specalign.rows.shapes import CONVERSATIONS, PROMPT_COLUMNS
from specalign.rows.splits import NoSplit, split_of

Row = Any
"""A dict of columns; a string for a line of text; whatever else a JSON file holds."""


EVERY = "*"
"""As `under` of `json_rows`: the rows under all keys."""


def read_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Row]:
    """The rows of one file. Memory holds one row or a batch of Parquet; JSON that is not in lines
    is read whole. Raises UserError for no such file, an unknown kind, or broken content.

    Args:
        under: of a JSON object with rows under several keys, the key to read (a split's name).
        under_key: the option that sets `under`, for the note on what is left out; "" = no option
            does, None = no note.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file of prompts")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"{path}: unknown kind of file{nearest_kind(path)}")
    if READERS[kind] is json_rows:
        return json_rows(path, under, under_key)
    return READERS[kind](path)


def kind_of(path: Path) -> str | None:
    """The key of `READERS` for this file name, or None."""
    suffix = suffix_of(path)
    return suffix if suffix in READERS else None


def suffix_of(path: Path) -> str:
    """The suffix in lower case, without that of packed files."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED else name.suffix


def nearest_kind(path: Path) -> str:
    """The supported suffix that is closest to the file's, as a hint."""
    return nearest(suffix_of(path), READERS)


def _read_txt(path: Path) -> Iterator[Row]:
    check_plain_text(path)
    for line in read_lines(path):
        if text := line.strip():
            yield text


def check_plain_text(path: Path) -> None:
    """Raises UserError for a .txt file that begins with a JSON object or a list of them."""
    first = next((line.strip() for line in read_lines(path) if line.strip()), "")
    if first == "[" or isinstance(decode_json(first), dict):
        suffix = ".json" if first == "[" else ".jsonl"
        raise UserError(f"{path}: contains JSON; rename it to {suffix} to read its rows")


def _read_csv(path: Path) -> Iterator[Row]:
    """Rows of a file with a header. The delimiter is the most frequent one in the header."""
    csv.field_size_limit(MOST_BYTES)  # default: 128 KiB
    lines = read_lines(path)
    header = next((line for line in lines if line.strip()), "")
    delimiter = "\t" if suffix_of(path) == ".tsv" else _find_delimiter(header)
    reader = csv.reader(chain([header], lines), delimiter=delimiter, strict=True)
    try:
        names = [name.strip() for name in next(reader, [])]
        for fields in reader:
            # joined files repeat the header
            if not any(fields) or [field.strip() for field in fields] == names:
                continue
            if any(fields[len(names) :]):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields, but the header has "
                    f"{len(names)}: quote fields that contain {delimiter!r}"
                )
            yield {name: field for name, field in zip(names, fields, strict=False) if name}
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise UserError(f"{where}: invalid CSV ({error})") from None


def _find_delimiter(header: str) -> str:
    unquoted = re.sub(r'"[^"]*"', "", header)
    best = max(",;\t|", key=unquoted.count)
    return best if best in unquoted else "\x1f"  # one field a line


def _read_arrow(path: Path) -> Iterator[Row]:
    """Rows of a Parquet file, or of an Arrow stream or file as `datasets` caches and saves them."""
    import pyarrow.parquet  # slow to import

    check_ordinary(path)
    kind = "Arrow" if suffix_of(path) == ".arrow" else "Parquet"
    try:
        file = pyarrow.parquet.ParquetFile(path) if kind == "Parquet" else None
        for batch in _arrow_batches(path) if file is None else file.iter_batches(1024):
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not readable {kind} ({reason})") from None


def _arrow_batches(path: Path) -> Iterable[Row]:
    import pyarrow

    source = pyarrow.memory_map(str(path))
    try:
        return pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        file = pyarrow.ipc.open_file(source)
        return (file.get_batch(i) for i in range(file.num_record_batches))


def json_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Row]:
    """The rows of a JSON file, whatever its ending: one value a line (memory holds one line), else
    a single value, which may be a list of rows, a row, or rows under a key."""
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


def _parse(text: str, path: Path, line: int) -> Row:
    try:
        return json.loads(text.rstrip())
    except json.JSONDecodeError as error:
        place = f"{path}, line {line + error.lineno - 1}"
        why = f"{error.msg.removesuffix(' at')} at column {error.colno}"
        raise UserError(f"{place}: not JSON ({why})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {line}: invalid JSON ({error})") from None


def find_rows(
    value: object, where: str, under: str | None = None, under_key: str | None = None
) -> list[Row]:
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
        return [value]
    if under == EVERY:
        return [row for rows in tables.values() for row in rows]
    key = under if under is not None and under in tables else str(next(iter(tables)))
    if len(tables) > 1 and key != under:
        option = f", or choose one ({under_key})" if under_key else ""
        raise UserError(
            f"{where}: contains rows under several keys ({', '.join(tables)}): keep one of "
            f"them{option}"
        )
    known = split_of(Path(under or ""))
    if known and split_of(Path(key)) not in (known, None):
        raise NoSplit(f"{where}: no split {under!r}{nearest(str(under), [key])}")
    unused = [k for k, item in value.items() if k != key and item not in (None, "", [], {})]
    if unused and under_key is not None:
        say_once(f"note: {where}: reads the rows under {key!r}; not used: {', '.join(unused)}")
    return tables[key]


def _is_row(value: dict[str, Row]) -> bool:
    """Whether an object is one row: it has a prompt."""
    columns = {str(name).casefold(): item for name, item in value.items()}
    if is_message(value) or any(isinstance(columns.get(name), str) for name in PROMPT_COLUMNS):
        return True
    turns = columns.get("turns")
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):
        return True
    talks = [turns, *(columns.get(name) for name in (*CONVERSATIONS, "prompt"))]
    if any(isinstance(talk, list) and talk and all(map(has_role, talk)) for talk in talks):
        return True
    return any(map(is_conversation, value.values()))


def _table(value: Row) -> list[Row]:
    """The rows in a list of objects, or in an object of objects by name; none in anything else."""
    rows = list(value.values()) if isinstance(value, dict) else value
    is_table = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return rows if is_table else []


READERS: dict[str, Callable[..., Iterator[Row]]] = {
    ".parquet": _read_arrow,
    ".arrow": _read_arrow,
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".json": json_rows,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".txt": _read_txt,
}
"""The reader by suffix. A folder with several kinds is read in the first of them."""
