"""Prompts from a file of one's own, read as `decode` reads them, or from a hub data set, through `datasets`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from align.common.errors import UserError, nearest
from align.common.files import expanded
from align.common.hub import hub_reachable
from align.common.tables import READERS, kind_of, read_rows
from align.common.text import printable, short


def check_source(source: str | None) -> None:
    """Raises UserError for prompts that can't be there: no such file, or a file of an unknown kind; the hub is not asked."""
    if source is None:
        return
    path = expanded(source)
    known = kind_of(path)
    if not known and path.suffix and path.exists():
        raise UserError(f"data.prompts={source!r}: unknown kind of file{nearest(path.suffix, READERS)}")
    if known and not path.is_file():
        raise UserError(f"data.prompts={source!r}: no such file")


def read_prompts(
    source: str, split: str, column: str, config: str | None = None, revision: str | None = None
) -> list[str]:
    """The texts in `column` of a file or a data set; a list of turns or messages gives its first user text. A text file has a
    prompt a line.

    `config`, `revision`: of a hub data set, which of its configurations and which branch, tag or commit.

    Raises:
        UserError: file or hub id not found, unreadable, empty, or without that column.
    """
    check_source(source)
    path = expanded(source)
    if kind_of(path) is not None:
        values, columns = _of_file(path, column)
    else:
        values, columns = _of_data_set(source, split, column, config, revision)
    if values is None:
        raise UserError(f"data.prompts={source!r}: no column {column!r}{nearest(column, columns)}")
    prompts = [text for text in map(_text, values) if text]
    for text in prompts:
        if printable(text) != text and any(0xD800 <= ord(c) < 0xE000 for c in text):  # which JSON can hold
            raise UserError(f"data.prompts={source!r}: {short(text)} holds half of a surrogate pair")
    if not prompts:
        raise UserError(f"data.prompts={source!r}: column {column!r} holds no text")
    return prompts


def _of_file(path: Path, column: str) -> tuple[list[object] | None, list[str]]:
    """What each row has in the column, None where none has one; and all columns."""
    rows = read_rows(path)
    if kind_of(path) == ".txt":
        return rows, []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(
                f"{path}, row {number}: expected an object with a column {column!r}, found {short(row)}"
            )
    columns = list(dict.fromkeys(str(key) for row in rows for key in row))
    values = [row.get(column) for row in rows]
    return (values if column in columns else None), columns


def _of_data_set(
    source: str, split: str, column: str, config: str | None, revision: str | None
) -> tuple[list[object] | None, list[str]]:
    if not expanded(source).exists() and not hub_reachable():
        raise UserError(f"data.prompts={source!r}: no such file, and the hub does not answer")
    import datasets

    try:
        table = datasets.load_dataset(source, config, split=split, revision=revision)
        return (list(table[column]) if column in table.column_names else None), list(table.column_names)
    except Exception as error:  # datasets raises many kinds of its own
        why = " ".join(str(error).split())
        if "Config name is missing" in why:
            why += " (data.prompts_config)"
        if "scripts are no longer supported" in why:
            why += "; its converted files: data.prompts_revision=refs/convert/parquet"
        raise UserError(f"data.prompts={source!r} can't be read: {why[:400]}") from None


def _text(value: object) -> str:
    if isinstance(value, list) and value:
        value = next(
            (
                v
                for v in value
                if not isinstance(v, dict) or v.get("role", v.get("from")) in ("user", "human")
            ),
            value[0],
        )
    if isinstance(value, dict):
        value = value.get("content", value.get("value", ""))
    return value.strip() if isinstance(value, str) else ""


class NearDuplicates:
    """Remembers sequences; says of a new one whether it is near to one seen before.

    Near means a Jaccard similarity of their sets of 3-grams of at least `threshold` (exact, through an inverted
    index; no hashing error). A threshold above 1 switches the check off.
    """

    def __init__(self, threshold: float, width: int = 3) -> None:
        self.threshold, self.width = threshold, width
        self._sizes: list[int] = []
        self._where: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def _grams(self, tokens: Sequence[int]) -> set[tuple[int, ...]]:
        if len(tokens) < self.width:
            return {tuple(tokens)}
        return {tuple(tokens[i : i + self.width]) for i in range(len(tokens) - self.width + 1)}

    def add(self, tokens: Sequence[int]) -> bool:
        """Remember `tokens` unless they are near to a remembered sequence; True when they were new."""
        grams = self._grams(tokens)
        shared: Counter[int] = Counter()
        for gram in grams:
            shared.update(self._where.get(gram, ()))
        for index, count in shared.items():
            if count / (len(grams) + self._sizes[index] - count) >= self.threshold:
                return False
        for gram in grams:
            self._where[gram].append(len(self._sizes))
        self._sizes.append(len(grams))
        return True
