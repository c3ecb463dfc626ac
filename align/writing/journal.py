"""Rows that a server has finished, kept until their batch is a shard: a run that is killed asks for none of them again.

One file a batch, `.answers-00012.jsonl` beside the shards, a line a row. Their settings are the manifest's. A line that was torn by a
kill is written again.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from align.common.files import check_ordinary
from align.writing.generation import Row

_NAME = re.compile(r"\.answers-(\d{5,})\.jsonl")


class Journal:
    """The finished rows of batches that are no shards yet.

    Args:
        vocabulary: every token is less.
    """

    def __init__(self, folder: Path, vocabulary: int) -> None:
        self.folder, self.vocabulary = folder, vocabulary
        self._files: dict[int, IO[bytes]] = {}

    def path(self, batch: int) -> Path:
        return self.folder / f".answers-{batch:05d}.jsonl"

    def restore(self, batch: int, rows: Sequence[Row]) -> list[Row]:
        """Bring rows of a batch to the ends that are kept; those without one, unchanged, in their order."""
        by_index, found = {row.index: row for row in rows}, set[int]()
        try:
            check_ordinary(self.path(batch))
            lines = self.path(batch).read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            lines = []
        whole = 0
        for line in lines:
            kept = self._read(line)
            if kept is None:
                break
            whole += len(line)
            row = by_index.get(kept["row"])
            if row is not None:
                row.tokens, row.answer_start, row.broken = (
                    kept["tokens"],
                    kept["answer_start"],
                    kept["broken"],
                )
                row.done, row.forced, row.opening = True, [], []
                found.add(row.index)
        if whole < sum(map(len, lines)):
            os.truncate(self.path(batch), whole)
        return [row for row in rows if row.index not in found]

    def _read(self, line: bytes) -> dict[str, Any] | None:
        """A line, or None where it is not whole."""
        try:
            found = json.loads(line)
        except ValueError:
            return None
        if not line.endswith(b"\n") or not isinstance(found, dict) or found.keys() != _FIELDS.keys():
            return None
        if any(type(found[name]) is not kind for name, kind in _FIELDS.items()):
            return None
        good = all(type(t) is int and 0 <= t < self.vocabulary for t in found["tokens"])
        return found if good and -1 <= found["answer_start"] <= len(found["tokens"]) else None

    def add(self, batch: int, row: Row) -> None:
        """Keep a row that is at its end."""
        if batch not in self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._files[batch] = self.path(batch).open("ab", buffering=0)
        values = {
            "row": row.index,
            "tokens": row.tokens,
            "answer_start": row.answer_start,
            "broken": row.broken,
        }
        line = json.dumps(values, separators=(",", ":")).encode() + b"\n"
        written = self._files[batch].write(line)
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path(batch)))

    def forget(self, batch: int) -> None:
        """A batch is a shard: what was kept of it, and of those before it, goes."""
        for number in [n for n in self._files if n <= batch]:
            self._files.pop(number).close()
        forget_until(self.folder, batch)

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def forget_until(folder: Path, batch: int) -> None:
    """Remove what was kept of a batch that is a shard, and of those before it."""
    for path in folder.glob(".answers-*.jsonl"):
        match = _NAME.fullmatch(path.name)
        if match and int(match[1]) <= batch:
            path.unlink(missing_ok=True)


_FIELDS = {"row": int, "tokens": list, "answer_start": int, "broken": str}
