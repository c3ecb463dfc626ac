"""Rows out of one local file: JSON in every form, CSV, Parquet, Arrow, and text with one row a
line; packed or not."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from align.common.errors import UserError, nearest
from align.common.files import MOST_BYTES, PACKED, check_ordinary, read_lines, read_text
from align.common.provenance import memory_bytes
from align.rows.json_forms import json_rows

T = TypeVar("T")
Row = Any
"""A dict of columns; a string for a line of text; whatever else a JSON file holds."""


def read_rows(path: Path, under: str | None = None, under_key: str | None = None) -> Iterator[Row]:
    """The rows of one file, one at a time: memory holds one row, or a batch of Parquet; a JSON file
    that is not in lines is read whole.

    Args:
        under: of a JSON object that holds rows under several keys, the key to read (a split's name,
            for instance).
        under_key: the option that sets `under`, for the note on what of such an object is left out;
            "" = no option does, None = without the note.

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
    """How the name ends, in lower case, without the ending of packed files."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in PACKED else name.suffix


def nearest_kind(path: Path) -> str:
    """The supported ending that is closest to the file's, as a hint."""
    return nearest(suffix_of(path), READERS)


ROW_BYTES = 250
"""What a row with one short value takes in memory, at least."""


def collect(rows: Iterable[T], where: str, size: Callable[[T], int] | None = None) -> list[T]:
    """All rows at once. `size`: bytes of a row beside `ROW_BYTES`; default: its texts.

    Raises:
        UserError: they take more than half of the machine's memory. The size of a file does not
            tell: packed files and Parquet hold repeated values once.
    """
    most = (memory_bytes() or 2**40) // 2
    found = list[T]()
    held = 0
    for row in rows:
        held += ROW_BYTES + (size or _text_bytes)(row)
        if held > most:
            raise UserError(
                f"{where}: its rows take more than the {most / 2**30:.2g} GiB that may be used ({len(found):,} fit): "
                "split the file, or take fewer rows"
            )
        found.append(row)
    return found


def _text_bytes(row: Row) -> int:
    values = row.values() if isinstance(row, dict) else [row]
    return sum(len(value) for value in values if isinstance(value, str | bytes | list))


def _txt(path: Path) -> Iterator[Row]:
    check_plain_text(path)
    for line in read_lines(path):
        if text := line.strip():
            yield text


class JSONText(UserError):
    """A .txt file that holds JSON."""


def check_plain_text(path: Path) -> None:
    """Raises JSONText for a .txt file that holds JSON: an object in each line, or one value."""
    lines = (line for line in read_lines(path) if line.strip())
    first = next(lines, "").strip()
    if first[:1] not in ("{", "["):
        return
    name = ""
    with suppress(ValueError, RecursionError):
        name = ".json" if isinstance(json.loads(read_text(path)), list | dict) else ""
    with suppress(ValueError, RecursionError):
        name = ".jsonl" if _all_objects(path) else name
    if name:
        raise JSONText(f"{path}: holds JSON; rename it to {name} to have its rows read")


def _all_objects(path: Path) -> bool:
    lines = (line for line in read_lines(path) if line.strip())
    return all(isinstance(json.loads(line), dict) for line in lines)


def _csv(path: Path) -> Iterator[Row]:
    """Rows of a file with a header. The delimiter is the one that the header has most; without any,
    each line is one field."""
    csv.field_size_limit(MOST_BYTES)  # the module's own limit is 128 KiB
    lines = (line for line in read_lines(path))
    header = next((line for line in lines if line.strip()), "")
    delimiter = "\t" if suffix_of(path) == ".tsv" else _delimiter(header)
    if marked := re.fullmatch(r"sep=(.)\s*", header):  # how Excel names it
        header, delimiter = next(lines, ""), marked[1]
    quoted = delimiter != "\t" or _is_quoted(path, header)
    reader = csv.reader(
        chain([header], lines),
        delimiter=delimiter,
        quoting=csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE,
        strict=True,
    )
    try:
        names = [name.strip() for name in next(reader, [])]
        for fields in reader:
            if not any(fields) or [field.strip() for field in fields] == names:  # joined files repeat it
                continue
            if any(fields[len(names) :]):
                raise UserError(
                    f"{path}, line {reader.line_num}: {len(fields)} fields, and its header names {len(names)}: quote a field that "
                    f"holds {delimiter!r}"
                )
            yield {name: field for name, field in zip(names, fields, strict=False) if name}
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not CSV that can be read ({error})") from None


_QUOTED_LINE = re.compile(r'(?:(?:"[^"]*(?:""[^"]*)*"|[^"\t\r\n][^\t\r\n]*|)(?:\t|\r*\n?$))+')


def _is_quoted(path: Path, header: str) -> bool:
    """Whether quotes enclose fields of a tab-separated file. They are text where a field begins with one and does not end with
    one on its line, and every line has the header's number of fields, which lines inside a field have not."""
    if all('"' not in line or _QUOTED_LINE.fullmatch(line) for line in read_lines(path)):
        return True
    return any(line.strip() and line.count("\t") != header.count("\t") for line in read_lines(path))


def _delimiter(header: str) -> str:
    unquoted = re.sub(r'"[^"]*"', "", header)
    counts = {mark: unquoted.count(mark) for mark in ",;\t|"}
    best = max(counts, key=lambda mark: counts[mark])
    return best if counts[best] else "\x1f"


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(1024):
            yield from batch.to_pylist()


def _arrow(path: Path) -> Iterator[Row]:
    """What `datasets` keeps and saves: an Arrow stream, or an Arrow file."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            batches: Iterable[Any] = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            file = pyarrow.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        for batch in batches:
            yield from batch.to_pylist()


def _columnar(read: Callable[[Path], Iterator[Row]], kind: str) -> Callable[[Path], Iterator[Row]]:
    """`read` with its library's errors as UserError, for broken files and values that Python has
    not: text that is no UTF-8, days beyond its calendar."""

    def rows(path: Path) -> Iterator[Row]:
        import pyarrow

        try:
            check_ordinary(path)
            yield from read(path)
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{path} is not readable {kind} ({why})") from None

    return rows


READERS: dict[str, Callable[..., Iterator[Row]]] = {
    ".parquet": _columnar(_parquet, "Parquet"),
    ".arrow": _columnar(_arrow, "Arrow"),
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".json": json_rows,
    ".csv": _csv,
    ".tsv": _csv,
    ".txt": _txt,
}
"""The reader of each kind, by the ending. A folder that holds several kinds is read in the first of
them."""
