"""Rows out of local files: JSONL, JSON, CSV, Parquet, plain text with one prompt a line; `.gz` of the text
kinds.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from align.common.errors import UserError, nearest
from align.common.files import check_ordinary, read_bytes
from align.common.provenance import memory_bytes

PROMPT_COLUMNS = ("prompt", "question", "messages", "text", "turns", "problem", "instruction", "content")
"""Columns of a file of prompts that may hold the prompt. The first one that holds something counts."""


def read_rows(path: Path) -> list[Any]:
    """The rows of one file, each a dict (or a string, for plain text).

    Raises:
        UserError: no such file, an unknown kind, broken content (with its line), or no rows.
    """
    if path.is_dir():
        raise UserError(f"{path} is a folder, not a file of prompts")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    kind = kind_of(path)
    if kind is None:
        raise UserError(f"{path}: unknown kind of file{nearest(path.suffix, READERS)}")
    rows = READERS[kind](path)
    if not rows:
        raise UserError(f"{path} holds no rows")
    return rows


def kind_of(path: Path) -> str | None:
    """The key of `READERS` for this file name, or None."""
    suffix = suffix_of(path)
    return suffix if suffix in READERS else None


def suffix_of(path: Path) -> str:
    """How the name ends, in small letters, without `.gz`."""
    return (Path(path.stem).suffix if path.suffix == ".gz" else path.suffix).lower()


def data_files(folder: Path, words: Sequence[str | None]) -> list[Path]:
    """The folder's data files, of one kind, and of those configurations and splits that are given, where the names tell.

    A hub folder often holds one set twice (raw JSONL beside Parquet): Parquet goes first, then JSONL.
    """
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and kind_of(path)]
    files = [path for path in files if path.name not in _ABOUT]
    for word in words:
        named = [
            path
            for path in files
            if word and word in str(path.relative_to(folder)).replace("-", ".").replace("/", ".")
        ]
        files = named or files
    for kind in (".parquet", ".jsonl", ".json", ".csv"):
        same = [path for path in files if kind_of(path) == kind]
        if same:
            return same
    return []


_ABOUT = ("dataset_infos.json", "dataset_info.json", "state.json")
"""Files of a hub folder that tell of the data."""


def read_text(path: Path) -> str:
    """A whole file. Raises UserError where it is no UTF-8 text or can't be read."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror or error}") from None


def _jsonl(path: Path) -> list[Any]:
    rows = []
    # JSON may hold line separators that are no newline
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise UserError(
                f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})"
            ) from None
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number}: not JSON that can be read ({error})") from None
    return rows


def _json(path: Path) -> list[Any]:
    text = read_text(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON that can be read ({error})") from None
    if isinstance(data, list):
        return data
    if isinstance(data, dict):
        for value in data.values():  # rows under a key: {"cases": [...]} or {"problems": {"id": {...}}}
            values = list(value.values()) if isinstance(value, dict) else value
            if isinstance(values, list) and values and isinstance(values[0], dict):
                return values
    raise UserError(f"{path}: expected a list of rows")


def _csv(path: Path) -> list[Any]:
    try:
        return list(csv.DictReader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise UserError(f"{path}: not CSV that can be read ({error})") from None


def _txt(path: Path) -> list[Any]:
    return [line.strip() for line in read_text(path).split("\n") if line.strip()]


ROW_BYTES = 250
"""What a row with one short value takes in memory, at least."""


def _parquet(path: Path) -> list[Any]:
    """All rows at once. What repeats takes no room in the file, so its size does not tell whether they fit."""
    return list(parquet_rows(path, (memory_bytes() or 2**40) // 2))


def parquet_rows(path: Path, most: int | None = None) -> Iterator[Any]:
    """Rows of a Parquet file, read a batch at a time. Raises UserError where it can't be read, holds values that Python has not (text that is
    no UTF-8, days beyond its calendar), or, where they are to be held, more than `most` bytes."""
    import pyarrow
    import pyarrow.parquet

    try:
        check_ordinary(path)
        with pyarrow.parquet.ParquetFile(path) as file:
            count, held = file.metadata.num_rows, file.metadata.num_rows * ROW_BYTES
            for batch in file.iter_batches(1024):
                if most is not None and held > most:
                    raise UserError(
                        f"{path}: its {count:,} rows take more than the {most / 2**30:.0f} GiB that may be used: "
                        "split the file, or take fewer rows"
                    )
                columns = [c.dictionary_decode() if pyarrow.types.is_dictionary(c.type) else c for c in batch]
                held += sum(column.nbytes for column in columns)
                yield from batch.to_pylist()
    except UserError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} is not readable Parquet ({why})") from None


READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".txt": _txt,
    ".parquet": _parquet,
}
