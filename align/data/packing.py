"""Packs samples into rows of equal length, holds out a share for validation, and orders the rows of
training."""

from collections.abc import Sequence
from functools import lru_cache
from typing import overload

import numpy as np
import torch

from specalign.common.batch import Batch, PackedRow
from specalign.common.errors import UserError
from specalign.common.text import plural
from specalign.rows.shards import ShardSamples, Texts

OPEN_ROWS = 64  # the last rows, into which a sample may still fit
TEXT = 1 << 40  # the first key of rows of other text
_OWN_STREAM, _TEXT_STREAM = 1, 7  # numbers that distinguish the permutations of one seed


def split_validation(samples: ShardSamples, fraction: float) -> tuple[ShardSamples, ShardSamples]:
    """(training, validation): a random share of whole samples is held out, at least one on each
    side. It is the same for every seed, so that runs are compared on the same text."""
    if len(samples) < 2:
        raise UserError(
            f"data.path: contains {plural(len(samples), 'sample')}, and one is held out for "
            "validation; generate more (data.samples, data.prompts) into a new folder (data.path)"
        )
    order = np.random.default_rng([0, 0x5EED]).permutation(len(samples))
    held = min(max(1, round(fraction * len(samples))), len(samples) - 1)
    training = torch.from_numpy(np.sort(order[held:]))
    validation = torch.from_numpy(np.sort(order[:held]))
    return samples.select(training), samples.select(validation)


class PackedRows(Sequence[PackedRow]):
    """Rows of `length` positions, each built on demand. members_M: the samples' indices by row;
    starts_R: where each row's begin, and the end, (R+1,)."""

    def __init__(
        self, samples: Texts, members_M: np.ndarray, starts_R: np.ndarray, length: int
    ) -> None:
        self.samples, self.length = samples, length
        self.members_M, self.starts_R = members_M, starts_R

    def __len__(self) -> int:
        return len(self.starts_R) - 1

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...
    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        found = range(len(self))[index]
        return self._build(found) if isinstance(found, int) else [*map(self._build, found)]

    def _build(self, row: int) -> PackedRow:
        members = self.members_M[self.starts_R[row] : self.starts_R[row + 1]]
        tokens = torch.zeros(self.length, dtype=torch.int64)
        positions = torch.zeros(self.length, dtype=torch.int64)
        document = torch.full((self.length,), -1, dtype=torch.int64)
        answer = torch.zeros(self.length, dtype=torch.bool)
        start = 0
        for number, member in enumerate(members.tolist()):
            sample = self.samples[member][: self.length]
            end = start + len(sample)
            tokens[start:end] = sample
            positions[start:end] = torch.arange(len(sample))
            document[start:end] = number
            answer[start + int(self.samples.answer_start[member]) : end] = True
            start = end
        return PackedRow(tokens, positions, document, answer)


def pack(samples: Texts, length: int, seed: int) -> PackedRows:
    """Pack samples, in a seeded order, into rows of `length`: first fit over the last open rows.
    Longer samples are cut."""
    order = np.random.default_rng([seed, 0xACC]).permutation(len(samples))
    sizes = samples.lengths.clamp_max(length).numpy()[order]
    smallest = int(sizes.min()) if len(sizes) else 0
    rows = np.empty(len(order), dtype=np.int64)
    open_rows = list[int]()  # of the last rows, those that have room for anything
    room = list[int]()
    count = 0
    for place, size in enumerate(sizes.tolist()):
        at = next((i for i, left in enumerate(room) if left >= size), None)
        if at is None:
            if open_rows and open_rows[0] < count + 1 - OPEN_ROWS:
                del open_rows[0], room[0]
            at = len(room)
            open_rows.append(count)
            room.append(length)
            count += 1
        rows[place] = open_rows[at]
        room[at] -= size
        if room[at] < smallest:
            del open_rows[at], room[at]
    by_row = np.argsort(rows, kind="stable")
    starts_R = np.searchsorted(rows[by_row], np.arange(count + 1))
    return PackedRows(samples, order[by_row], starts_R, length)


def collate(rows: Sequence[PackedRow]) -> Batch:
    """Stack rows into a batch."""
    columns = zip(*(vars(row).values() for row in rows), strict=True)
    return Batch(*(torch.stack(column) for column in columns))


@lru_cache(maxsize=4)  # a step may span two epochs
def _permutation(size: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(size)


class RowStream:
    """The rows that training reads, a function of data and seed alone, so that a run resumes by
    starting at another place: other text at the first `text_places`, then the target's own texts,
    each with a new seeded order in every epoch."""

    def __init__(
        self,
        own: Sequence[PackedRow],
        seed: int,
        text: Sequence[PackedRow] = (),
        text_places: int = 0,
    ) -> None:
        self.own, self.seed, self.text, self.text_places = own, seed, text, text_places

    def key(self, place: int) -> int:
        """The key of the row at a place 0, 1, 2, …: from 0 on, of other text from `TEXT` on."""
        is_text = place < self.text_places
        rows = self.text if is_text else self.own
        number = _TEXT_STREAM if is_text else _OWN_STREAM
        epoch, index = divmod(place if is_text else place - self.text_places, len(rows))
        order = _permutation(len(rows), self.seed, number, epoch)
        return int(order[index]) + (TEXT if is_text else 0)

    def row(self, key: int) -> PackedRow:
        return self.text[key - TEXT] if key >= TEXT else self.own[key]
