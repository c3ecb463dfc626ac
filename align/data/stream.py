"""Which packed row stands at each place of the training stream.

A stream is a function of data and seed alone: to resume is to begin at another place. Rows have keys: those of the target's
own words count from 0, those of other text from `TEXT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from align.common.batch import PackedRow

TEXT = 1 << 40


class Stream(Protocol):
    """What training reads."""

    def key(self, place: int) -> int:
        """The key of the row at a place, 0, 1, 2, …"""

    def row(self, key: int) -> PackedRow:
        """The row of that key."""


class Shuffled:
    """One seeded permutation of the rows after another. `number` tells the streams of one seed apart."""

    def __init__(self, rows: Sequence[PackedRow], seed: int, number: int = 1) -> None:
        self.rows, self.seed, self.number = rows, seed, number
        self._orders: dict[int, np.ndarray] = {}

    def key(self, place: int) -> int:
        epoch, index = divmod(place, len(self.rows))
        if epoch not in self._orders:
            while len(self._orders) > 1:  # a step may span two epochs, seldom more
                self._orders.pop(next(iter(self._orders)))
            order = np.random.default_rng([self.seed, self.number, epoch])
            self._orders[epoch] = order.permutation(len(self.rows))
        return int(self._orders[epoch][index])

    def row(self, key: int) -> PackedRow:
        return self.rows[key]


class TextFirst:
    """The first `places` places are other text's, those after them the target's own words'."""

    def __init__(self, text: Stream, own: Stream, places: int) -> None:
        self.text, self.own, self.places = text, own, places

    def key(self, place: int) -> int:
        if place < self.places:
            return TEXT + self.text.key(place)
        return self.own.key(place - self.places)

    def row(self, key: int) -> PackedRow:
        return self.text.row(key - TEXT) if key >= TEXT else self.own.row(key)
