"""Documents out of files, folders and hub data sets, one after the other: memory holds one file of prose or one row of a table."""

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
from align.rows.folders import choose_files, visible_files
from align.rows.hub_rows import hub_rows
from align.rows.messages import is_conversation
from align.rows.shapes import CONVERSATIONS, NAMES
from align.rows.splits import NoSplit, split_of
from align.rows.tables import JSONText, check_plain_text, kind_of, read_rows, suffix_of

TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")
"""Files of rows, by their ending. In a folder a .json may be anything; given by itself it is read."""
PROSE = (".txt", ".md", ".rst", ".tex", ".html", ".org")
CODE = (
    ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala", ".js", ".jsx", ".ts", ".tsx",
    ".rb", ".php", ".pl", ".sh", ".sql", ".r", ".jl", ".lua", ".hs", ".ml", ".swift", ".cs", ".css", ".toml", ".yaml", ".yml",
)  # fmt: skip
MOST_CHARACTERS = 200_000
"""A longer text is several documents, cut at the ends of lines: what is tokenised at a time stays small."""
OF_COLUMN = "values of column"
"""How `left_out` counts what a column that is not read holds; the column's name follows."""
_LOOKED_AT = 10_000
"""Rows of a hub data set that are downloaded to look for the column."""
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
    """Raises UserError that names all prompts, texts and exclusions that can't be there; the hub is not asked."""
    excluded = data.exclude if data.text else ()
    check_all(
        [
            partial(check_source, data.prompts),
            *(partial(check_text_source, source) for source in data.text),
            *(partial(check_excluded, source) for source in excluded),
        ]
    )


def check_text_source(source: str) -> None:
    """Raises UserError for a source that can't be there: no such file or folder, nothing in it, and no hub id; the hub is not asked."""
    path = expanded(source, "data.text")
    if path.is_dir() and not any(_kind(file) in ("table", "text") for file in visible_files(path)):
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
        texts = _of_file(path, options, source, left_out)
    else:
        rows = hub_rows(source, options.split, options.config, options.revision, "data.text", streaming=True)
        texts = _of_rows(rows, _Texts(options.column, source, left_out, _LOOKED_AT))
    for text in texts:
        if wrong := _no_text(text, options.column):
            left_out[wrong] += 1
        else:
            assert text is not None
            yield from _parts(text)


def _of_file(path: Path, options: HubOptions, source: str, left_out: Counter[str]) -> Iterator[str | None]:
    """The rows of a table; any other file is one text."""
    check_ordinary(path)
    if kind_of(path) in (None, ".txt"):
        if kind_of(path) == ".txt":
            check_plain_text(path)
        yield read_text(path)
    else:
        rows = read_rows(path, options.split, "data.text_split")
        yield from _of_rows(rows, _Texts(options.column, source, left_out))


def _of_rows(rows: Iterable[Any], texts: _Texts) -> Iterator[str | None]:
    yield from texts.read(rows)
    texts.check()


class _Texts:
    """The texts in a column of rows, and whether any row had it. `left_out` counts what the other columns hold."""

    def __init__(self, column: str, source: str, left_out: Counter[str], most: int | None = None) -> None:
        self.column, self.source, self.left_out, self.most = column, source, left_out, most
        self.rows, self.found, self.talks = 0, False, False
        self.columns: dict[str, None] = {}

    def read(self, rows: Iterable[Any]) -> Iterator[str | None]:
        """The text of each row, None where it has none; a row that is a string is one. Raises UserError after `most` rows without the
        column."""
        for row in rows:
            self.rows += 1
            held = row if isinstance(row, dict) else {self.column: row}
            value = held.get(self.column)
            if isinstance(value, str):
                self.found = True
                others = {str(name) for name, value in held.items() if value not in (None, "", [], {})}
                self.left_out.update(f"{OF_COLUMN} {name!r}" for name in others - {self.column, *NAMES})
            elif not self.found:
                self.talks = self.talks or is_conversation(row) or is_conversation([row])
                self.columns.update(dict.fromkeys(map(str, held)))
                if self.rows == self.most:
                    self.check()
            yield value if isinstance(value, str) else None

    def check(self) -> None:
        """Raises UserError where there are rows, and none has a text in the column."""
        if not self.rows or self.found:
            return
        if self.talks or {name.strip().casefold() for name in self.columns} & {*CONVERSATIONS}:
            raise UserError(
                f"data.text={self.source!r}: no column {self.column!r}: its rows are conversations, which data.prompts reads"
            )
        if self.column not in self.columns:
            near = nearest(self.column, self.columns)
            raise UserError(f"data.text={self.source!r}: no column {self.column!r} (data.text_column){near}")


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
    """Files in the order of their names, hidden ones and those of unknown kinds left out; of files of rows and .txt files those of
    the wanted split, where names or the folder's card tell."""
    found, tables = False, _Texts(options.column, str(folder), left_out)
    chosen = _of_split(folder, options)
    for path in visible_files(folder):
        kind = _kind(path)
        if kind == "other":
            left_out["files of other kinds"] += 1
        elif _has_split(path) and path not in chosen:
            left_out["files of other splits"] += 1
        elif kind == "table":
            yield from tables.read(read_rows(path, options.split, "data.text_split"))
        else:
            try:
                if suffix_of(path) == ".txt":
                    check_plain_text(path)
                text = read_text(path)
            except JSONText:
                left_out["files of JSON named .txt"] += 1
                continue
            except UserError as error:
                known = "is not UTF-" in str(error)
                left_out["files that are no UTF-8 text" if known else "files that can't be read"] += 1
                continue
            found = True
            yield text
    if not found:
        tables.check()
        if not tables.rows:
            raise _nothing(folder)


def _has_split(path: Path) -> bool:
    """Whether a file may be one split of a data set: rows and plain text, not source code or a page."""
    return _kind(path) == "table" or suffix_of(path) == ".txt"


def _of_split(folder: Path, options: HubOptions) -> set[Path]:
    """The files of the wanted split. Raises UserError where the folder holds other splits and nothing else."""
    files = visible_files(folder)
    split = [file for file in files if _has_split(file)]
    if not any(_kind(file) == "table" or split_of(file.relative_to(folder)) for file in split):
        return set(split)
    try:
        return {*choose_files(folder, split, options.split, options.config, "data.text")}
    except NoSplit:
        if len(split) == sum(_kind(file) in ("table", "text") for file in files):
            raise
        return set()


def _kind(path: Path) -> str:
    """What a file in a folder is taken for: table, text or other."""
    suffix = suffix_of(path)
    return "table" if suffix in TABLES else "text" if suffix in PROSE + CODE else "other"


def _nothing(folder: Path) -> UserError:
    return UserError(f"data.text={str(folder)!r}: holds no text, source code, .jsonl or .parquet")
