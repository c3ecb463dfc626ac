"""Texts for drafters that look things up or count n-grams, as the target's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specalign.common.errors import UserError, nearest
from specalign.common.files import expand_path, read_text
from specalign.lm.model import Target
from specalign.rows.tables import kind_of, read_rows


def read_corpus(path: str | Path, target: Target) -> list[list[int]]:
    """The texts of a file, tokenized as plain text.

    Args:
        path: `.txt`, one text; or rows with the key `text`, one text each: `.jsonl`, `.json`,
            `.csv`, `.parquet`. `.gz` of the text kinds too.

    Raises:
        UserError: no such file, an unknown kind, broken content, or nothing in it.
    """
    path = expand_path(path)
    if path.is_file() and kind_of(path) == ".txt":
        texts = [read_text(path)]
    else:
        texts = [_text(row, f"{path}, row {i}") for i, row in enumerate(read_rows(path), 1)]
    tokens = [target.text_tokens(text) for text in texts if text.strip()]
    if not tokens:
        raise UserError(f"{path} holds no text")
    return tokens


def _text(row: Any, place: str) -> str:
    if isinstance(row, dict) and "text" not in row:
        raise UserError(f"{place}: no key 'text'{nearest('text', row)}")
    if not isinstance(row, dict) or not isinstance(row["text"], str):
        raise UserError(f"{place}: needs a string under the key 'text'")
    try:
        row["text"].encode()
    except UnicodeEncodeError as error:  # half a surrogate pair, which JSON can hold
        raise UserError(f"{place}: not valid Unicode at character {error.start}") from None
    return row["text"]
