"""Texts for drafters that look things up or count n-grams, as the target's tokens."""

from __future__ import annotations

from specalign.common.errors import UserError
from specalign.common.files import expand_path, read_text
from specalign.lm.model import Target
from specalign.rows.tables import kind_of, read_rows


def read_corpus(file: str, target: Target) -> list[list[int]]:
    """The texts of a file, tokenized as plain text: of `.txt` one text; of `.jsonl`, `.json`,
    `.csv`, `.parquet` the key `text` of each row. Raises UserError for broken content, or nothing
    in it."""
    path = expand_path(file)
    plain = kind_of(path) == ".txt"
    rows = [{"text": read_text(path)}] if plain else list(read_rows(path))
    tokens = []
    for number, row in enumerate(rows, 1):
        text = row.get("text") if isinstance(row, dict) else None
        if not isinstance(text, str):
            raise UserError(f"{path}, row {number}: needs a string under the key 'text'")
        if text.strip():
            # half a surrogate pair, which JSON can hold, is no text
            tokens.append(target.text_tokens(text.encode(errors="replace").decode()))
    if not tokens:
        raise UserError(f"{path} holds no text")
    return tokens
