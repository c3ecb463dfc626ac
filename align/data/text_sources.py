"""Documents of files, folders and Hub data sets, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from align.common.errors import UserError, check_all, nearest
from align.common.files import check_ordinary, expanded, read_text
from align.common.hub import is_hub_id, missing
from align.config.recipe import DataConfig
from align.data.overlap import check_excluded
from align.data.prompts import check_source
from align.rows.folders import visible_files
from align.rows.hub_rows import hub_rows
from align.rows.messages import is_conversation
from align.rows.shapes import CONVERSATIONS
from align.rows.splits import belongs_to, split_of
from align.rows.tables import check_plain_text, kind_of, read_rows, suffix_of

TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")
"""Files of rows in a folder, where .json may be anything; a single .json file is read."""
TEXTS = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt"),
    *(".scala", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".sh", ".sql", ".r", ".jl"),
    *(".lua", ".hs", ".ml", ".swift", ".cs", ".css", ".toml", ".yaml", ".yml"),
)
MOST_CHARACTERS = 200_000
"""Longer texts are split at line ends, so that little is tokenised at a time."""
_SEARCHED_ROWS = 10_000
"""Rows of a Hub data set that are downloaded to find the column."""
_OVERLAP_CHARACTERS = 4_000
"""Of the previous part of a long text, to find passages across the cut."""


class Document(NamedTuple):
    """A text, or a part of a long one. before: the end of the previous part."""

    text: str
    before: str = ""


@dataclass(frozen=True)
class HubOptions:
    """Of a Hub data set; column and split apply to local tables too."""

    column: str = "text"
    split: str = "train"
    config: str | None = None
    revision: str | None = None


def check_sources(data: DataConfig) -> None:
    """Raises UserError that names all missing prompts, texts and exclusions, without asking the Hub."""
    excluded = data.exclude if data.text else ()
    check_all(
        [
            partial(check_source, data.prompts),
            *(partial(check_text_source, source) for source in data.text),
            *(partial(check_excluded, source) for source in excluded),
        ]
    )


def check_text_source(source: str) -> None:
    """Raises UserError for a source that is no file, no folder with text and no Hub id."""
    path = expanded(source, "data.text")
    if path.is_dir() and not any(suffix_of(f) in TABLES + TEXTS for f in visible_files(path)):
        raise UserError(f"data.text={source!r}: holds no text, source code, .jsonl or .parquet")
    if not path.exists() and (path.suffix or not is_hub_id(source)):
        reason = "no such file or folder, and no hub id (owner/name)"
        raise missing(f"data.text={source!r}", source, reason, files=True)


def read_documents(source: str, options: HubOptions, left_out: Counter[str]) -> Iterator[Document]:
    """The texts of a source in a fixed order, long ones in parts. `left_out` counts what is skipped,
    by reason.

    Raises:
        UserError: it can't be read, or no row has the column.
    """
    check_text_source(source)
    path = expanded(source, "data.text")
    column = _Column(options.column, source, left_out)
    if path.is_dir():
        texts = _read_folder(path, options, column, left_out)
    elif path.exists():
        texts = _read_file(path, options, column)
    else:
        rows = hub_rows(source, options.split, options.config, options.revision, "data.text", streaming=True)
        texts = column.read(rows, _SEARCHED_ROWS)
    empty = True
    for text in texts:
        empty = False
        reason = _find_fault(text)
        if reason:
            left_out[reason] += 1
        else:
            yield from _split_text(text)
    if empty:
        column.check()


def _read_file(path: Path, options: HubOptions, column: _Column) -> Iterator[str]:
    """The rows of a table; any other file is one text."""
    check_ordinary(path)
    kind = kind_of(path)
    if kind is None or kind == ".txt":
        if kind == ".txt":
            check_plain_text(path)
        yield read_text(path)
    else:
        yield from column.read(read_rows(path, options.split, "data.text_split"))


def _read_folder(folder: Path, options: HubOptions, column: _Column, left_out: Counter[str]) -> Iterator[str]:
    """The visible files in the order of their names. Tables and .txt files whose names say another
    split are left out."""
    files = visible_files(folder)
    named = any(split_of(f.relative_to(folder)) for f in files if _has_split(f))
    for path in files:
        if suffix_of(path) not in TABLES + TEXTS:
            left_out["files of other kinds"] += 1
        elif named and _has_split(path) and not belongs_to(path.relative_to(folder), options.split):
            left_out["files of other splits"] += 1
        elif suffix_of(path) in TABLES:
            yield from column.read(read_rows(path, options.split, "data.text_split"))
        else:
            try:
                yield from _read_file(path, options, column)
            except UserError:
                left_out["files that can't be read as text"] += 1


def _has_split(path: Path) -> bool:
    """Whether a file may belong to a split of a data set, unlike source code or a page."""
    return suffix_of(path) in (*TABLES, ".txt")


class _Column:
    """Reads a column of rows, and counts those without it."""

    def __init__(self, name: str, source: str, left_out: Counter[str]) -> None:
        self.name, self.source, self.left_out = name, source, left_out
        self.rows, self.found, self.conversations = 0, False, False
        self.columns: dict[str, None] = {}

    def read(self, rows: Iterable[Any], most: int | None = None) -> Iterator[str]:
        """The text of each row that has one; a row that is a string is one.

        Raises:
            UserError: none of the first `most` rows has the column.
        """
        for row in rows:
            self.rows += 1
            columns = row if isinstance(row, dict) else {self.name: row}
            text = columns.get(self.name)
            if isinstance(text, str):
                self.found = True
                yield text
                continue
            self.left_out[f"rows whose column {self.name!r} holds no text"] += 1
            if not self.found:
                self.conversations |= is_conversation(row) or is_conversation([row])
                self.columns.update(dict.fromkeys(map(str, columns)))
                if self.rows == most:
                    self.check()

    def check(self) -> None:
        """Raises UserError if there are rows and none has a text in the column."""
        if not self.rows or self.found:
            return
        reason = f"data.text={self.source!r}: no column {self.name!r}"
        if self.conversations or {*CONVERSATIONS} & {c.strip().casefold() for c in self.columns}:
            raise UserError(f"{reason}: its rows are conversations, which data.prompts reads")
        if self.name not in self.columns:
            raise UserError(f"{reason} (data.text_column){nearest(self.name, self.columns)}")


def _find_fault(text: str) -> str | None:
    """Why a text can't be used."""
    if not text or text.isspace():
        return "empty documents"
    if "\0" in text:  # UTF-16 without a byte order mark
        return "documents with a NUL (UTF-16, or no text)"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON may hold half a surrogate pair
        return "documents that are no Unicode text"
    return None


def _split_text(text: str) -> Iterator[Document]:
    start, before = 0, ""
    while len(text) - start > MOST_CHARACTERS:
        end = text.rfind("\n", start, start + MOST_CHARACTERS) + 1 or start + MOST_CHARACTERS
        yield Document(text[start:end], before)
        start, before = end, text[max(0, end - _OVERLAP_CHARACTERS) : end]
    yield Document(text[start:], before)
