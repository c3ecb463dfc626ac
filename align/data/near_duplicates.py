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
_TABLES = """
CREATE TABLE texts (number INTEGER PRIMARY KEY, size INTEGER, grams BLOB);
CREATE TABLE firsts (gram INTEGER, number INTEGER, PRIMARY KEY (gram, number)) WITHOUT ROWID;
"""
_CANDIDATES = """
SELECT number, grams FROM firsts JOIN texts USING (number)
WHERE gram = ? AND size BETWEEN ? AND ?
"""


class NearDuplicates:
    """Remembers token lists in a temporary SQLite database on disk, so memory stays flat.
    `threshold`: the Jaccard similarity of two sets of 3-grams from which one is a near duplicate of
    the other; above 1, nothing is."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._database = sqlite3.connect("")  # a private file that is deleted when closed
        self._database.executescript(_TABLES)

    def close(self) -> None:
        self._database.close()

    def add(self, tokens: Sequence[int]) -> bool:
        """Remember a text unless it is a near duplicate; True if it was new."""
        grams = _find_grams(tokens)
        count = len(grams) - math.ceil(self.threshold * len(grams) - 1e-9) + 1
        first = grams[:count].tolist()
        least = self.threshold * len(grams) - 1e-6
        most = len(grams) / max(self.threshold, 1e-9) + 1e-6
        compared = set[int]()
        for gram in first:
            for number, blob in self._database.execute(_CANDIDATES, (gram, least, most)):
                if number not in compared and self._is_near(grams, blob):
                    return False
                compared.add(number)
        insert = "INSERT INTO texts (size, grams) VALUES (?, ?)"
        added = self._database.execute(insert, (len(grams), grams.tobytes())).lastrowid
        pairs = [(gram, added) for gram in first]
        self._database.executemany("INSERT INTO firsts VALUES (?, ?)", pairs)
        return True

    def _is_near(self, grams: np.ndarray, blob: bytes) -> bool:
        other = np.frombuffer(blob, dtype=np.int64)
        shared = len(np.intersect1d(grams, other, assume_unique=True))
        return shared / (len(grams) + len(other) - shared) >= self.threshold


def _find_grams(tokens: Sequence[int]) -> np.ndarray:
    """The distinct 3-grams of a text as numbers, those of high (rare) token ids first."""
    ids = np.asarray(tokens, dtype=np.int64)
    if len(ids) < 3:
        ids = np.concatenate([ids, np.full(3 - len(ids), _PADDING)])
    grams = np.unique((ids[:-2] << 2 * _BITS) | (ids[1:-1] << _BITS) | ids[2:])
    rarity = (grams >> 2 * _BITS) + (grams >> _BITS & _PADDING) + (grams & _PADDING)
    return grams[np.lexsort((grams, -rarity))]
