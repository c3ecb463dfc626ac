"""Documents of files, folders and Hub data sets, one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path

from align.config.data import DataConfig
from align.data.overlap import check_excluded
from align.data.prompts import check_source
from specalign.common.errors import UserError, check_all, nearest
from specalign.common.files import check_ordinary, expand_path, read_text
from specalign.common.hub import is_hub_id, missing
from specalign.rows.conversation import is_conversation
from specalign.rows.folders import choose_files, visible_files
from specalign.rows.hub_rows import hub_rows
from specalign.rows.shapes import CONVERSATIONS, NAMES
from specalign.rows.splits import NoSplit, split_of
from specalign.rows.tables import check_plain_text, kind_of, read_rows, suffix_of

TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")
"""Files of rows in a folder, where .json may be anything; a single .json file is read."""
TEXTS = (
    *(".txt", ".md", ".rst", ".tex", ".html", ".org"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt"),
    *(".scala", ".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".pl", ".sh", ".sql", ".r", ".jl"),
    *(".lua", ".hs", ".ml", ".swift", ".cs", ".css", ".toml", ".yaml", ".yml"),
)
UNUSED_COLUMN = "values of column"
"""How `left_out` counts what the columns without the text hold."""
SEARCHED_ROWS = 1000
"""Of a table or a Hub data set, without a text, after which it lacks the column."""
MOST_CHARACTERS = 200_000
"""Longer texts are split at line ends, so that little is tokenised at a time."""


@dataclass(frozen=True)
class HubOptions:
    """Options of a Hub data set; column and split also apply to local tables."""

    column: str = "text"
    split: str = "train"
    config: str | None = None
    revision: str | None = None


def check_sources(data: DataConfig) -> None:
    """Raises UserError that names all missing prompts, texts and exclusions, without asking the
    Hub."""
    excluded = data.exclude if data.text else ()
    check_all(
        [
            partial(check_source, data.prompts),
            *(partial(check_text_source, source) for source in data.text),
            *(partial(check_excluded, source) for source in excluded),
        ]
    )


def check_text_source(source: str) -> None:
    """Raises UserError for a source that is neither a file, a folder with text nor a Hub id."""
    path = expand_path(source, "data.text")
    if path.is_dir() and not any(suffix_of(f) in TABLES + TEXTS for f in visible_files(path)):
        raise UserError(f"data.text={source!r}: contains no text, source code, .jsonl or .parquet")
    if not path.exists() and (path.suffix or not is_hub_id(source)):
        reason = "no such file or folder, and no hub id (owner/name)"
        raise missing(f"data.text={source!r}", source, reason, files=True)


def read_documents(source: str, options: HubOptions, left_out: Counter[str]) -> Iterator[str]:
    """The texts of a source in a fixed order, long ones in parts. `left_out` counts skipped ones by
    reason. Raises UserError: it can't be read, or has no such column."""
    check_text_source(source)
    path = expand_path(source, "data.text")
    if path.is_dir():
        texts = _read_folder(path, options, left_out)
    elif path.exists():
        texts = _read_file(path, options, left_out)
    else:
        hub = options.split, options.config, options.revision
        texts = _read_column(
            hub_rows(source, *hub, "data.text", streaming=True), source, options, left_out
        )
    for text in texts:
        if not text.strip():
            left_out["empty documents"] += 1
        elif not _is_text(text):
            left_out["documents that are not Unicode text"] += 1
        else:
            yield from _split_text(text)


def _is_text(text: str) -> bool:
    """False for UTF-16 without a byte order mark, and for half a surrogate pair."""
    try:
        return "\0" not in text and bool(text.encode())
    except UnicodeEncodeError:
        return False


class _NoColumn(UserError):
    """A table lacks the column of texts."""


def _read_column(
    rows: Iterable[object], source: str, options: HubOptions, left_out: Counter[str]
) -> Iterator[str]:
    """The text of each row that has one; a row that is a string is one. Raises _NoColumn if none of
    the first `SEARCHED_ROWS` has the column."""
    column = options.column
    rows = iter(rows)
    first = list(islice(rows, SEARCHED_ROWS))
    if first and not any(isinstance(r, str) or isinstance(r, dict) and column in r for r in first):
        raise _NoColumn(f"data.text={source!r}: {_describe_columns(first, column)}")
    for row in chain(first, rows):
        columns = row if isinstance(row, dict) else {column: row}
        text = columns.get(column)
        if isinstance(text, str):
            filled = {str(k) for k, v in columns.items() if v not in (None, "", [], {})}
            left_out.update(f"{UNUSED_COLUMN} {k!r}" for k in filled - {column, *NAMES})
            yield text
        else:
            left_out[f"rows without text in column {column!r}"] += 1


def _describe_columns(rows: Sequence[object], column: str) -> str:
    """What rows without the column have."""
    columns = dict.fromkeys(str(name) for row in rows if isinstance(row, dict) for name in row)
    names = {name.strip().casefold() for name in columns}
    if names & {*CONVERSATIONS} or any(is_conversation(r) or is_conversation([r]) for r in rows):
        return f"no column {column!r}: its rows are conversations, which data.prompts reads"
    return f"no column {column!r} (data.text_column){nearest(column, columns)}"


def _read_file(path: Path, options: HubOptions, left_out: Counter[str]) -> Iterator[str]:
    """The rows of a table; any other file is one text."""
    check_ordinary(path)
    kind = kind_of(path)
    if kind is None or kind == ".txt":
        if kind == ".txt":
            check_plain_text(path)
        yield read_text(path)
    else:
        rows = read_rows(path, options.split, "data.text_split")
        yield from _read_column(rows, str(path), options, left_out)


def _read_folder(folder: Path, options: HubOptions, left_out: Counter[str]) -> Iterator[str]:
    """The visible files in the order of their names. Tables and .txt files of other splits are left
    out."""
    files = visible_files(folder)
    others = _find_other_splits(folder, files, options)
    kinds = {path for path in files if suffix_of(path) not in TABLES + TEXTS}
    # reading may end before the last file
    for reason, skipped in (("files of other kinds", kinds), ("files of other splits", others)):
        if skipped:
            left_out[reason] += len(skipped)
    for path in files:
        if path in others or path in kinds:
            continue
        try:
            yield from _read_file(path, options, left_out)
        except _NoColumn:
            left_out[f"tables without column {options.column!r}"] += 1
        except UserError:
            if suffix_of(path) in TABLES:
                raise
            left_out["files that can't be read as text"] += 1


def _find_other_splits(folder: Path, files: Sequence[Path], options: HubOptions) -> set[Path]:
    """The tables and .txt files that the folder's card or their names give to other splits. Raises
    NoSplit if nothing else is there."""
    readable = [file for file in files if suffix_of(file) in TABLES + TEXTS]
    split = [file for file in readable if suffix_of(file) in (*TABLES, ".txt")]
    tables = any(suffix_of(file) in TABLES for file in split)
    if not tables and not any(split_of(file.relative_to(folder)) for file in split):
        return set()
    try:
        return {*split} - {*choose_files(folder, split, options.split, options.config, "data.text")}
    except NoSplit:
        if len(split) == len(readable):
            raise
        return {*split}


def _split_text(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > MOST_CHARACTERS:
        end = text.rfind("\n", start, start + MOST_CHARACTERS) + 1 or start + MOST_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
