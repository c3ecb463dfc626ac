"""Prompts of a file, a folder or a hub data set, as conversations that the target answers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from align.common.errors import UserError
from align.common.files import expanded
from align.common.hub import is_hub_id, missing
from align.rows.conversation import Conversation
from align.rows.folders import table_files
from align.rows.hub_rows import hub_rows
from align.rows.prompts import read_prompt_rows
from align.rows.tables import kind_of, nearest_kind, read_rows


def check_source(source: str | None) -> None:
    """Raises UserError for prompts that can't be there: no such file, or a file of an unknown kind;
    the hub is not asked."""
    if source is None:
        return
    path = expanded(source)
    known = kind_of(path)
    if not known and path.is_file():
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest_kind(path)}")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"data.prompts={source!r} holds no rows")
    one_word = path.parts == (source,)  # as some data sets of the hub are called
    if not path.exists() and (known or not (one_word or is_hub_id(source))):
        raise missing(f"data.prompts={source!r}", source, "no such file", files=True)


def read_prompts(
    source: str,
    split: str,
    column: str | None,
    config: str | None = None,
    revision: str | None = None,
    quiet: bool = False,
) -> list[Conversation]:
    """The whole conversations of a file, a folder or a data set; one note tells what is left out.

    Args:
        split, config, revision: of a data set, also one in a folder: which split, which of its
            configurations, and which branch, tag or commit.
        column: that holds the prompts; None: the first of `align.rows.shapes.PROMPT_COLUMNS` that
            does.
        quiet: without the note.

    Raises:
        UserError: file or hub id not found, unreadable, without that column, or without a prompt.
    """
    check_source(source)
    rows = _rows(source, split, config, revision)
    found = read_prompt_rows(rows, f"data.prompts={source!r}", column, "data.prompts_column", quiet)
    return [row.conversation for row in found]


def _rows(source: str, split: str, config: str | None, revision: str | None) -> Iterator[Any]:
    path = expanded(source)
    if path.is_file():
        yield from read_rows(path, split, "data.prompts_split")
        return
    by_name = re.fullmatch(r"\w+", split)  # `datasets` alone knows train[:100]
    files = table_files(path, split, config, "data.prompts") if path.is_dir() and by_name else []
    if files:
        for file in files:
            yield from read_rows(file, split, "data.prompts_split")
    else:
        yield from hub_rows(source, split, config, revision, key="data.prompts")
