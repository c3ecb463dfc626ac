"""The packed row at each position of the training stream, a function of data and seed alone, so a
run resumes by starting at another position. Rows have keys: the target's texts from 0, other text
from `TEXT`."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specalign.common.batch import PackedRow

TEXT = 1 << 40


@lru_cache(maxsize=4)  # a step may span two epochs
def _permutation(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


class Shuffled:
    """One seeded permutation of the rows per epoch. `number` distinguishes streams of one seed."""

    def __init__(self, rows: Sequence[PackedRow], seed: int, number: int = 1) -> None:
        self.rows, self.seed, self.number = rows, seed, number

    def key(self, place: int) -> int:
        epoch, index = divmod(place, len(self.rows))
        return int(_permutation(len(self.rows), self.seed, self.number, epoch)[index])

    def row(self, key: int) -> PackedRow:
        return self.rows[key]


class TextFirst:
    """Other text for the first `places` positions, then the target's own text."""

    def __init__(self, text: Shuffled, own: Shuffled, places: int) -> None:
        self.text, self.own, self.places = text, own, places

    def key(self, place: int) -> int:
        if place < self.places:
            return TEXT + self.text.key(place)
        return self.own.key(place - self.places)

    def row(self, key: int) -> PackedRow:
        return self.text.row(key - TEXT) if key >= TEXT else self.own.row(key)


RowStream = Shuffled | TextFirst
"""The rows that training reads: `key(place)` of the row at each place 0, 1, 2, …, and the `row` of
a key."""
