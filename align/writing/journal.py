"""Rows that a server has finished, kept until their batch is a shard, so that a killed run resumes.

One file a batch, `.answers-00012.jsonl` next to the shards, one line a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from align.writing.rows import Row


class Journal:
    """The finished rows of batches that are not yet shards."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[int, IO[bytes]] = {}

    def path(self, batch: int) -> Path:
        return self.folder / f".answers-{batch:05d}.jsonl"

    def restore(self, batch: int, rows: Sequence[Row]) -> list[Row]:
        """Restore the finished rows of a batch; returns the others. A torn last line is removed."""
        path = self.path(batch)
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

    def add(self, batch: int, row: Row) -> None:
        """Append a finished row."""
        if batch not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[batch] = self.path(batch).open("ab")
        finished = {
            "row": row.index,
            "tokens": row.tokens,
            "answer_start": row.answer_start,
            "broken": row.broken,
        }
        file = self._files[batch]
        file.write(json.dumps(finished, separators=(",", ":")).encode() + b"\n")
        file.flush()

    def forget(self, batch: int) -> None:
        """Remove the rows of a batch that is a shard, and of those before it."""
        for number in [n for n in self._files if n <= batch]:
            self._files.pop(number).close()
        forget_until(self.folder, batch)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def forget_until(folder: Path, batch: int) -> None:
    """Remove the rows that were kept of batches up to this one."""
    for path in folder.glob(".answers-*.jsonl"):
        number = path.stem.partition("-")[2]
        if number.isdecimal() and int(number) <= batch:
            path.unlink(missing_ok=True)
