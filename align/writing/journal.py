"""Journal of rows that a server has finished, kept until their batch is written as a shard, so that
a killed run can resume: one file per batch (`.answers-00012.jsonl`, next to the shards), one line
per row."""

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
    missing = {row.index: row for row in rows}
    path = _path(folder, batch)
    if not path.exists():
        return list(rows)
    raw = path.read_bytes()
    size = raw.rfind(b"\n") + 1
    if size < len(raw):
        os.truncate(path, size)
    for line in raw[:size].splitlines():
        finished = json.loads(line)
        row = missing.pop(finished["row"], None)
        if row is not None:
            row.tokens = finished["tokens"]
            row.answer_start = finished["answer_start"]
            row.broken = finished["broken"]
            row.done = True
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
        if int(path.stem.partition("-")[2]) <= batch:
            path.unlink(missing_ok=True)
