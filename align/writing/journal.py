"""Rows that a server has finished, kept until their batch is a shard, so that a killed run resumes.

One file a batch, `.answers-00012.jsonl` next to the shards, one line a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from align.writing.rows import Row


def _path(folder: Path, batch: int) -> Path:
    return folder / f".answers-{batch:05d}.jsonl"


def restore_rows(folder: Path, batch: int, rows: Sequence[Row]) -> list[Row]:
    """Restore the finished rows of a batch; returns the others. A torn last line is removed."""
    path = _path(folder, batch)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    missing = {row.index: row for row in rows}
    size = 0
    for line in lines:
        try:
            finished = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n"):
            break
        size += len(line)
        row = missing.pop(finished["row"], None)
        if row is not None:
            row.tokens = finished["tokens"]
            row.answer_start = finished["answer_start"]
            row.broken = finished["broken"]
            row.done = True
    if lines and size < path.stat().st_size:
        os.truncate(path, size)
    return list(missing.values())


def append_row(folder: Path, batch: int, row: Row) -> None:
    """Append a finished row to its batch's file."""
    finished = {
        "row": row.index,
        "tokens": row.tokens,
        "answer_start": row.answer_start,
        "broken": row.broken,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with _path(folder, batch).open("ab") as file:
        file.write(json.dumps(finished, separators=(",", ":")).encode() + b"\n")


def forget_until(folder: Path, batch: int) -> None:
    """Remove the rows of this batch, which is a shard, and of those before it."""
    for path in folder.glob(".answers-*.jsonl"):
        number = path.stem.partition("-")[2]
        if number.isdecimal() and int(number) <= batch:
            path.unlink(missing_ok=True)
