"""Reads prompts and documents of files, folders and Hub data sets."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

from align.config.data import DataConfig
from specalign.common.errors import UserError, nearest
from specalign.common.files import check_ordinary, expand_path, read_text
from specalign.common.hub import is_hub_id, missing
from specalign.rows.conversation import Conversation
from specalign.rows.folders import table_files, visible_files
from specalign.rows.hub_rows import hub_rows
from specalign.rows.prompts import read_prompt_rows
from specalign.rows.shapes import NAMES
from specalign.rows.tables import check_plain_text, kind_of, nearest_kind, read_rows, suffix_of
from specalign.suites.overlap import check_excluded

TABLES = (".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".tsv")
"""Files that make a folder a data set, in which .json may be anything."""
UNUSED_COLUMN = "values of column"  # how `left_out` counts what the columns without the text hold
SEARCHED_ROWS = 1000
"""Of a table or a Hub data set, without a text, after which it lacks the column."""
MOST_CHARACTERS = 200_000
"""Longer texts are split at line ends, so that little is tokenised at a time."""


def check_sources(data: DataConfig) -> None:
    """Raises UserError for missing prompts, texts or exclusions, without asking the Hub."""
    if data.prompts is not None:
        check_prompts(data.prompts)
    for source in data.text:
        check_text_source(source)
    for source in data.exclude if data.text else ():
        check_excluded(source)


def check_prompts(source: str) -> None:
    """Raises UserError for a missing file or an unknown kind."""
    path = expand_path(source)
    kind = kind_of(path)
    if path.is_file() and not kind:
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest_kind(path)}")
    may_be_on_hub = is_hub_id(source) or path.parts == (source,)  # some ids have no owner
    if not path.exists() and (kind or not may_be_on_hub):
        raise missing(f"data.prompts={source!r}", source, "no such file", files=True)


def read_prompts(data: DataConfig) -> list[Conversation]:
    """The conversations of `data.prompts`; one note reports what is left out. Raises UserError: not
    found, unreadable, without that column, or without a prompt."""
    assert data.prompts is not None
    check_prompts(data.prompts)
    source, split, config = data.prompts, data.prompts_split, data.prompts_config
    path, files = expand_path(source), list[Path]()
    if path.is_file():
        files = [path]
    elif path.is_dir() and re.fullmatch(r"\w+", split):  # only `datasets` knows train[:100]
        files = table_files(path, split, config, "data.prompts")
    tables = (read_rows(file, split, "data.prompts_split") for file in files)
    rows: Iterator[object] = chain.from_iterable(tables)
    if not files:
        rows = hub_rows(source, split, config, data.prompts_revision, key="data.prompts")
    where = f"data.prompts={source!r}"
    found = read_prompt_rows(rows, where, data.prompts_column, "data.prompts_column")
    return [row.conversation for row in found]


def check_text_source(source: str) -> None:
    """Raises UserError for a source that is neither a file, a folder nor a Hub id."""
    path = expand_path(source, "data.text")
    if not path.exists() and (path.suffix or not is_hub_id(source)):
        reason = "no such file or folder, and no hub id (owner/name)"
        raise missing(f"data.text={source!r}", source, reason, files=True)


def read_documents(source: str, data: DataConfig, left_out: Counter[str]) -> Iterator[str]:
    """The texts of a source in a fixed order, long ones in parts. `left_out` counts skipped ones by
    reason. Raises UserError: it can't be read, or has no such column."""
    check_text_source(source)
    path = expand_path(source, "data.text")
    texts: Iterator[str]
    if path.is_dir():
        texts = _read_folder(path, data, left_out)
    elif path.is_file():
        texts = _read_file(path, data, left_out)
    else:
        hub = data.text_split, data.text_config, data.text_revision
        rows = hub_rows(source, *hub, "data.text", streaming=True)
        texts = _read_column(rows, source, data.text_column, left_out)
    for text in texts:
        if text.strip():
            yield from _split_text(text)
        else:
            left_out["empty documents"] += 1


def _read_folder(folder: Path, data: DataConfig, left_out: Counter[str]) -> Iterator[str]:
    """The rows of a data set; without tables every file that is text (prose, source code)."""
    files = visible_files(folder)
    if any(suffix_of(file) in TABLES for file in files):
        for file in table_files(folder, data.text_split, data.text_config, "data.text"):
            yield from _read_file(file, data, left_out)
        return
    for file in files:
        try:
            yield read_text(file)
        except UserError:
            left_out["files that are not text"] += 1


def _read_file(path: Path, data: DataConfig, left_out: Counter[str]) -> Iterator[str]:
    """The rows of a table; any other file is one text."""
    check_ordinary(path)
    kind = kind_of(path)
    if kind not in (None, ".txt"):
        rows = read_rows(path, data.text_split, "data.text_split")
        yield from _read_column(rows, str(path), data.text_column, left_out)
        return
    if kind == ".txt":
        check_plain_text(path)
    yield read_text(path)


def _read_column(
    rows: Iterable[object], source: str, column: str, left_out: Counter[str]
) -> Iterator[str]:
    """The text of each row that has one; a row that is a string is one. Raises UserError if none of
    the first `SEARCHED_ROWS` has the column."""
    rows = iter(rows)
    first = list(islice(rows, SEARCHED_ROWS))
    if first and not any(isinstance(r, str) or isinstance(r, dict) and column in r for r in first):
        columns = {str(name) for row in first if isinstance(row, dict) for name in row}
        hint = nearest(column, columns)
        raise UserError(f"data.text={source!r}: no column {column!r} (data.text_column){hint}")
    for row in chain(first, rows):
        values = row if isinstance(row, dict) else {column: row}
        text = values.get(column)
        if isinstance(text, str):
            filled = {str(k) for k, v in values.items() if v not in (None, "", [], {})}
            left_out.update(f"{UNUSED_COLUMN} {k!r}" for k in filled - {column, *NAMES})
            yield text
        else:
            left_out[f"rows without text in column {column!r}"] += 1


def _split_text(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > MOST_CHARACTERS:
        end = text.rfind("\n", start, start + MOST_CHARACTERS) + 1 or start + MOST_CHARACTERS
        yield text[start:end]
        start = end
    yield text[start:]
