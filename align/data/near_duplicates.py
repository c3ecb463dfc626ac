"""Which texts were said before, or nearly: an exact search by shared 3-grams, in memory or in a file.

Two sets A and B of Jaccard similarity t or more share an element among the first |A| − ⌈t·|A|⌉ + 1 of A and the first
|B| − ⌈t·|B|⌉ + 1 of B, in any common order (prefix filtering: Chaudhuri et al., ICDE 2006; Bayardo et al., WWW 2007). Those
few are looked up, rare ones first, and the sets that share one are compared whole: no sketch, so no error, unlike MinHash.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

_BITS = 21
_NONE = (1 << _BITS) - 1
"""Stands where a text of fewer than three tokens has none; no vocabulary is that large."""
_TABLES = """
CREATE TABLE IF NOT EXISTS texts (number INTEGER PRIMARY KEY, size INTEGER NOT NULL, grams BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS firsts (gram INTEGER NOT NULL, number INTEGER NOT NULL, PRIMARY KEY (gram, number)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY CHECK (id = 0), holds TEXT NOT NULL);
"""


def journal_of(file: Path) -> Path:
    """Where SQLite keeps what it has to take back after a kill."""
    return file.with_name(file.name + "-journal")


class NearDuplicates:
    """Remembers token lists; says of a new one whether it is near to one seen before.

    Near means a Jaccard similarity of their sets of 3-grams of at least `threshold`. A threshold above 1 switches the check off.

    Args:
        file: where they are remembered, an SQLite file that is begun anew where it can't be read; None = in memory.
    """

    def __init__(self, threshold: float, file: Path | None = None) -> None:
        self.threshold, self.file = threshold, file
        try:
            self._open(file)
        except (OSError, sqlite3.Error):
            self._begin_anew()

    def _open(self, file: Path | None) -> None:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
        self._table = sqlite3.connect(":memory:" if file is None else str(file))
        self._table.executescript(_TABLES)
        self._table.execute("SELECT (SELECT COUNT(*) FROM texts), (SELECT COUNT(*) FROM state)")
        if (
            file is not None and journal_of(file).exists()
        ):  # a killed process's: what is written next removes it
            self._table.execute("PRAGMA user_version=0")

    def _begin_anew(self) -> None:
        assert self.file is not None
        try:
            self.close()
            for name in (self.file, journal_of(self.file)):
                name.unlink(missing_ok=True)
            self._open(self.file)
        except (OSError, sqlite3.Error):  # no file can be there: remembered as long as this process lives
            self._open(None)

    def close(self) -> None:
        """Close the file; what was added since the last `keep` is forgotten."""
        with suppress(AttributeError):  # was never opened
            self._table.close()

    def holds(self, what: str) -> bool:
        """Whether it was last kept as holding that, no more and no less."""
        return self._run("SELECT holds FROM state").fetchall() == [(what,)]

    def clear(self) -> None:
        """Forget everything."""
        for table in ("texts", "firsts", "state"):
            self._run(f"DELETE FROM {table}")

    def keep(self, what: str) -> None:
        """Make what was added since the last time outlast this process; `what` says what all of it is."""
        self._run("INSERT OR REPLACE INTO state VALUES (0, ?)", what)
        self._run("COMMIT")

    def mark(self) -> None:
        """What is added from here on is forgotten at `forget`."""
        self._run("SAVEPOINT mark")

    def forget(self) -> None:
        """Forget what was added since `mark`, and nothing that was added before."""
        self._run("ROLLBACK TO mark")
        self._run("RELEASE mark")

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        try:
            return self._table.execute(statement, values)
        except sqlite3.Error as error:  # a full disk, another process
            raise OSError(f"{self.file}: {error}") from None

    def add(self, tokens: Sequence[int]) -> bool:
        """Remember `tokens` unless they are near to a remembered list; True when they were new."""
        grams = _grams(tokens)
        first = grams[: len(grams) - math.ceil(self.threshold * len(grams) - 1e-9) + 1].tolist()
        if any(self._near(grams, number) for number in self._candidates(first, len(grams))):
            return False
        number = self._run(
            "INSERT INTO texts (size, grams) VALUES (?, ?)", len(grams), grams.tobytes()
        ).lastrowid
        for gram in first:
            self._run("INSERT INTO firsts VALUES (?, ?)", gram, number)
        return True

    def _candidates(self, first: list[int], size: int) -> Iterable[int]:
        """Texts that share one of the first grams and are of a size that allows it."""
        found = set[int]()
        for gram in first:
            rows = self._run(
                "SELECT number FROM firsts JOIN texts USING (number) WHERE gram = ? AND size BETWEEN ? AND ?",
                gram,
                self.threshold * size - 1e-6,
                size / max(self.threshold, 1e-9) + 1e-6,
            )
            found.update(number for (number,) in rows)
        return found

    def _near(self, grams: np.ndarray, number: int) -> bool:
        (blob,) = self._run("SELECT grams FROM texts WHERE number = ?", number).fetchone()
        other = np.frombuffer(blob, dtype=np.int64)
        shared = len(np.intersect1d(grams, other, assume_unique=True))
        return shared > 0 and shared / (len(grams) + len(other) - shared) >= self.threshold


def _grams(tokens: Sequence[int]) -> np.ndarray:
    """The different 3-grams of a text as single numbers, those of high token ids, which are rare, first."""
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) < 3:
        ids = np.concatenate([ids, np.full(3 - len(ids), _NONE)])
    grams = np.unique((ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:])
    rarity = (grams >> 2 * _BITS) + (grams >> _BITS & _NONE) + (grams & _NONE)
    return grams[np.lexsort((grams, -rarity))]
