"""Documents out of files, folders and hub data sets, one after the other: memory holds one file of prose or one row of a table."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from align.common.errors import UserError, nearest
from align.common.files import MOST_BYTES, check_ordinary, expanded
from align.common.hub import hub_reachable, is_hub_id, missing
from align.common.tables import kind_of, parquet_rows, read_rows, read_text, suffix_of
from align.common.text import short
from align.config.recipe import DataConfig
from align.data.overlap import check_excluded
from align.data.prompts import check_source

TABLES = (".jsonl", ".json", ".csv", ".parquet")
PROSE = (".txt", ".md", ".rst", ".tex", ".html", ".org")
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx",
    ".rb", ".php", ".pl", ".sh", ".sql", ".r", ".jl", ".lua", ".hs", ".ml", ".swift", ".cs", ".css", ".toml", ".yaml", ".yml",
)  # fmt: skip
MOST_CHARACTERS = 200_000
"""A longer text is several documents, cut at the ends of lines: what is tokenised at a time stays small."""
_KEPT_BEFORE = 4_000
"""Of them, what is shown again to find passages: many times a passage's length."""


class Document(NamedTuple):
    """A text, or a part of a long one. before: the end of the part before it, for passages that the cut goes through."""

    text: str
    before: str = ""


@dataclass(frozen=True)
class HubOptions:
    """Of a hub data set: column, split, configuration, and branch, tag or commit. A table on disk has the column too."""

    column: str = "text"
    split: str = "train"
    config: str | None = None
    revision: str | None = None


def check_sources(data: DataConfig) -> None:
    """Raises UserError for prompts, texts and what is to be kept out of them that can't be there; the hub is not asked."""
    check_source(data.prompts)
    for source in data.text:
        check_text_source(source)
    for source in data.exclude if data.text else ():
        check_excluded(source)


def check_text_source(source: str) -> None:
    """Raises UserError for a source that can't be there: no such file or folder, nothing in it, and no hub id; the hub is not asked."""
    path = expanded(source, "data.text")
    if path.is_dir() and not any(_kind(file, path) in ("table", "text") for file in path.rglob("*")):
        raise _nothing(path)
    if path.exists() or (is_hub_id(source) and not path.suffix):
        return
    said = "no such file or folder, and no hub id (owner/name)"
    raise missing(f"data.text={source!r}", source, said, files=True)


def documents(source: str, options: HubOptions, left_out: Counter[str]) -> Iterator[Document]:
    """The texts of one source in a fixed order; long ones in parts. `left_out` counts what is skipped, by its reason.

    Raises:
        UserError: it can't be read, or has no such column.
    """
    check_text_source(source)
    path = expanded(source, "data.text")
    if path.is_dir():
        texts = _of_folder(path, options, left_out)
    elif path.exists():
        texts = _of_file(path, options)
    else:
        texts = _of_hub(source, options)
    for text in texts:
        if wrong := _no_text(text, options.column):
            left_out[wrong] += 1
        else:
            assert text is not None
            yield from _parts(text)


def _no_text(text: str | None, column: str) -> str | None:
    """Why it is left out."""
    if text is None:
        return f"rows whose column {column!r} holds no text"
    if not text or text.isspace():
        return "empty documents"
    if "\0" in text:  # every second character of UTF-16 that does not say what it is
        return "documents with a NUL (UTF-16, or no text)"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may hold half a surrogate pair, which no tokenizer takes
        return "documents that are no Unicode text"
    return None


def _parts(text: str) -> Iterator[Document]:
    start, before = 0, ""
    while len(text) - start > MOST_CHARACTERS:
        end = text.rfind("\n", start, start + MOST_CHARACTERS) + 1 or start + MOST_CHARACTERS
        yield Document(text[start:end], before)
        start, before = end, text[max(0, end - _KEPT_BEFORE) : end]
    yield Document(text[start:], before)


def _of_folder(folder: Path, options: HubOptions, left_out: Counter[str]) -> Iterator[str | None]:
    """Files in the order of their names, hidden ones and those of unknown kinds left out."""
    found = False
    for path in sorted(folder.rglob("*")):
        kind = _kind(path, folder)
        if kind == "table":
            found = True
            yield from _of_file(path, options)
        elif kind == "text":
            try:
                text = read_text(path)
            except UserError as error:
                known = "not UTF-8" in str(error)
                left_out["files that are no UTF-8 text" if known else "files that can't be read"] += 1
                continue
            found = True
            yield text
        elif kind == "other":
            left_out["files of other kinds"] += 1
    if not found:
        raise _nothing(folder)


def _kind(path: Path, folder: Path) -> str:
    """What a file in a folder is taken for: table, text, other; nothing where it is hidden or no file."""
    if not path.is_file() or any(part.startswith(".") for part in path.relative_to(folder).parts):
        return ""
    suffix = suffix_of(path)
    return "table" if suffix in (".jsonl", ".parquet") else "text" if suffix in PROSE + CODE else "other"


def _nothing(folder: Path) -> UserError:
    return UserError(f"data.text={str(folder)!r}: holds no text, source code, .jsonl or .parquet")


def _of_file(path: Path, options: HubOptions) -> Iterator[str | None]:
    """A table's rows; any other file is one text."""
    check_ordinary(path)
    kind = kind_of(path)
    if kind not in TABLES:
        yield read_text(path)
        return
    read: Callable[[Path], Iterable[Any]] = {".jsonl": _jsonl, ".parquet": parquet_rows}.get(kind, read_rows)
    for number, row in enumerate(read(path), 1):
        yield _text(row, options.column, f"{path}, row {number}")


def _jsonl(path: Path) -> Iterator[Any]:
    """One row a line, a line at a time."""
    opened = gzip.open if path.suffix == ".gz" else open
    number = 0
    try:
        with opened(path, "rb") as file:
            while line := file.readline(MOST_BYTES + 1):
                number += 1
                if len(line) > MOST_BYTES:
                    raise UserError(
                        f"{path}, line {number}: more than {MOST_BYTES >> 20} MiB, or without end"
                    )
                if line.strip():
                    yield json.loads(line.decode("utf-8-sig"))
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else error
        raise UserError(f"{path}, line {number}: not JSON ({why})") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} can't be read: {error}") from None


def _text(row: Any, column: str, where: str) -> str | None:
    """What stands in a row's column; None where that is no text."""
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object with a column {column!r}, found {short(row)}")
    if column not in row:
        raise UserError(f"{where}: no column {column!r} (data.text_column){nearest(column, map(str, row))}")
    value = row[column]
    return value if isinstance(value, str) else None


def _of_hub(source: str, options: HubOptions) -> Iterator[str | None]:
    """Streamed where the hub answers: nothing is downloaded that is not read. Else out of the local cache."""
    import datasets

    online = hub_reachable()
    try:
        rows = datasets.load_dataset(
            source, options.config, split=options.split, revision=options.revision, streaming=online
        )
        for number, row in enumerate(rows, 1):
            yield _text(row, options.column, f"data.text={source!r}, row {number}")
    except UserError:
        raise
    except Exception as error:  # datasets raises many kinds of its own
        why = " ".join(str(error).split())
        if "Config name is missing" in why:
            why += " (data.text_config)"
        if not online:
            why = f"the hub does not answer, and the local cache does not hold it: {why}"
        raise UserError(f"data.text={source!r} can't be read: {why[:400]}") from None
