"""Reads the rows of one local file: JSON, CSV, Parquet, Arrow, or text with one row a line."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import MOST_BYTES, PACKED, check_ordinary, read_lines
from specalign.rows.json_forms import json_rows

Row = Any
"""A dict of columns; a string for a line of text; whatever else a JSON file holds."""


def read_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Row]:
    """The rows of one file. Memory holds one row or a batch of Parquet; JSON that is not in lines
    is read whole.

    Args:
        under: of a JSON object with rows under several keys, the key to read (a split's name).
        under_key: the option that sets `under`, for the note on what is left out; "" = no option
            does, None = no note.

    Raises:
        UserError: no such file, an unknown kind, or broken content (with its line).
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
    """Raises UserError for a .txt file whose first line is a JSON object or opens a list of
    them."""
    first = next((line.strip() for line in read_lines(path) if line.strip()), "")
    is_json = first == "["
    with suppress(ValueError, RecursionError):
        is_json = is_json or isinstance(json.loads(first), dict)
    if is_json:
        suffix = ".json" if first == "[" else ".jsonl"
        raise UserError(f"{path}: holds JSON; rename it to {suffix} to have its rows read")


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
                    f"{path}, line {reader.line_num}: {len(fields)} fields, and its header names "
                    f"{len(names)}: quote a field that holds {delimiter!r}"
                )
            yield {name: field for name, field in zip(names, fields, strict=False) if name}
    except csv.Error as error:
        where = f"{path}, line {reader.line_num}"
        raise UserError(f"{where}: not CSV that can be read ({error})") from None


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
        batches: Iterable[Any]
        if kind == "Parquet":
            batches = pyarrow.parquet.ParquetFile(path).iter_batches(1024)
        else:
            batches = _arrow_batches(path)
        for batch in batches:
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not readable {kind} ({reason})") from None


def _arrow_batches(path: Path) -> Iterable[Any]:
    import pyarrow

    source = pyarrow.memory_map(str(path))
    try:
        return pyarrow.ipc.open_stream(source)
    except pyarrow.ArrowInvalid:
        file = pyarrow.ipc.open_file(source)
        return (file.get_batch(i) for i in range(file.num_record_batches))


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
