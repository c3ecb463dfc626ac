"""Finds near-duplicate texts exactly, by shared 3-grams.

Sets A and B with Jaccard similarity ≥ t share an element among the first |A| − ⌈t·|A|⌉ + 1 of A and
the first |B| − ⌈t·|B|⌉ + 1 of B, in any common order (prefix filtering: Chaudhuri et al., ICDE
2006; Bayardo et al., WWW 2007). Those few are looked up, rare ones first, and sets that share one
are compared in full: unlike with MinHash, nothing is estimated.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence

import numpy as np

_BITS = 21
_PADDING = (1 << _BITS) - 1
"""Stands for the missing tokens of a text of fewer than three; no vocabulary is that large."""


class NearDuplicates:
    """Remembers token lists in a temporary SQLite database on disk, so memory stays flat.

    Args:
        threshold: the Jaccard similarity of two sets of 3-grams from which one is a near duplicate
            of the other; above 1, nothing is.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._database = sqlite3.connect("")  # a private file that is deleted when closed
        self._database.executescript(
            "CREATE TABLE texts (number INTEGER PRIMARY KEY, size INTEGER, grams BLOB);"
            "CREATE TABLE firsts (gram INTEGER, number INTEGER, PRIMARY KEY (gram, number))"
            " WITHOUT ROWID;"
        )

    def close(self) -> None:
        self._database.close()

    def add(self, tokens: Sequence[int]) -> bool:
        """Remember a text unless it is a near duplicate; True if it was new."""
        grams = _find_grams(tokens)
        count = len(grams) - math.ceil(self.threshold * len(grams) - 1e-9) + 1
        first = grams[:count].tolist()
        if any(self._is_near(grams, number) for number in self._find_candidates(first, len(grams))):
            return False
        insert = "INSERT INTO texts (size, grams) VALUES (?, ?)"
        number = self._database.execute(insert, (len(grams), grams.tobytes())).lastrowid
        pairs = [(gram, number) for gram in first]
        self._database.executemany("INSERT INTO firsts VALUES (?, ?)", pairs)
        return True

    def _find_candidates(self, first: list[int], size: int) -> set[int]:
        """Texts that share one of the first grams and have a size that allows the threshold."""
        least = self.threshold * size - 1e-6
        most = size / max(self.threshold, 1e-9) + 1e-6
        query = "SELECT number FROM firsts JOIN texts USING (number) WHERE gram = ? AND size BETWEEN ? AND ?"
        found = set[int]()
        for gram in first:
            found.update(number for (number,) in self._database.execute(query, (gram, least, most)))
        return found

    def _is_near(self, grams: np.ndarray, number: int) -> bool:
        query = "SELECT grams FROM texts WHERE number = ?"
        (blob,) = self._database.execute(query, (number,)).fetchone()
        other = np.frombuffer(blob, dtype=np.int64)
        shared = len(np.intersect1d(grams, other, assume_unique=True))
        return shared > 0 and shared / (len(grams) + len(other) - shared) >= self.threshold


def _find_grams(tokens: Sequence[int]) -> np.ndarray:
    """The distinct 3-grams of a text as numbers, those of high (rare) token ids first."""
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) < 3:
        ids = np.concatenate([ids, np.full(3 - len(ids), _PADDING)])
    grams = np.unique((ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:])
    rarity = (grams >> 2 * _BITS) + (grams >> _BITS & _PADDING) + (grams & _PADDING)
    return grams[np.lexsort((grams, -rarity))]
