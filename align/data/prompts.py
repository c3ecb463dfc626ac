"""Reads the prompts of a file, a folder or a Hub data set as conversations."""

import re
from collections.abc import Iterator

from specalign.common.errors import UserError
from specalign.common.files import expand_path
from specalign.common.hub import is_hub_id, missing
from specalign.rows.conversation import Conversation
from specalign.rows.folders import table_files
from specalign.rows.hub_rows import hub_rows
from specalign.rows.prompts import read_prompt_rows
from specalign.rows.tables import kind_of, nearest_kind, read_rows


def check_source(source: str | None) -> None:
    """Raises UserError for a missing file or an unknown kind, without asking the Hub."""
    if source is None:
        return
    path = expand_path(source)
    kind = kind_of(path)
    if path.is_file() and not kind:
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest_kind(path)}")
    may_be_on_hub = is_hub_id(source) or path.parts == (source,)  # some ids have no owner
    if not path.exists() and (kind or not may_be_on_hub):
        raise missing(f"data.prompts={source!r}", source, "no such file", files=True)


def read_prompts(
    source: str,
    split: str,
    column: str | None,
    config: str | None = None,
    revision: str | None = None,
) -> list[Conversation]:
    """The conversations of a file, a folder or a data set; one note reports what is left out.
    Raises UserError: not found, unreadable, without that column, or without a prompt.

    Args:
        split, config, revision: of a data set: its split, configuration, and branch, tag or commit.
        column: that holds the prompts; None = the first known one.
    """
    check_source(source)
    rows = _read_source(source, split, config, revision)
    where = f"data.prompts={source!r}"
    found = read_prompt_rows(rows, where, column, "data.prompts_column")
    return [row.conversation for row in found]


def _read_source(
    source: str, split: str, config: str | None, revision: str | None
) -> Iterator[object]:
    path = expand_path(source)
    files = []
    if path.is_file():
        files = [path]
    elif path.is_dir() and re.fullmatch(r"\w+", split):  # only `datasets` knows train[:100]
        files = table_files(path, split, config, "data.prompts")
    if not files:
        yield from hub_rows(source, split, config, revision, key="data.prompts")
    for file in files:
        yield from read_rows(file, split, "data.prompts_split")
