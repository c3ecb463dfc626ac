"""Samples as packed rows of one length, and the share that is held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch

from align.common.batch import Batch, PackedRow
from align.common.errors import UserError
from align.data.shards import Texts


def split_validation(samples: Texts, fraction: float) -> tuple[Texts, Texts]:
    """(training, validation): a random share of whole samples is held out; at least one on each side.

    Always the same share, whatever the run's seed: runs that differ in it are compared on the same text, and one that starts
    from another's drafter is not validated on what that was trained on.
    """
    if len(samples) < 2:
        raise UserError("data: at least 2 samples are needed to hold one out for validation")
    order = np.random.default_rng([0, 0x5EED]).permutation(len(samples))
    held = min(max(1, round(fraction * len(samples))), len(samples) - 1)
    return samples.select(sorted(order[held:].tolist())), samples.select(sorted(order[:held].tolist()))


class PackedRows(Sequence[PackedRow]):
    """Rows of `length` positions, each put together where it is asked for.

    Args:
        samples: the texts. rows: which of them each row holds, in order.
    """

    def __init__(self, samples: Texts, rows: list[list[int]], length: int) -> None:
        self.samples, self.rows, self.length = samples, rows, length

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> PackedRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PackedRow]: ...
    def __getitem__(self, index: int | slice) -> PackedRow | list[PackedRow]:
        if isinstance(index, slice):
            return [_packed_row(self.samples, row, self.length) for row in self.rows[index]]
        return _packed_row(self.samples, self.rows[index], self.length)


def pack(samples: Texts, length: int, seed: int) -> PackedRows:
    """Pack samples, in a seeded order, into rows of `length`: first fit over the last open rows; longer ones are cut."""
    order = np.random.default_rng([seed, 0xACC]).permutation(len(samples))
    sizes = samples.lengths.clamp_max(length).tolist()
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order.tolist():
        size = sizes[index]
        for r in range(max(0, len(rows) - 64), len(rows)):
            if room[r] >= size:
                rows[r].append(index)
                room[r] -= size
                break
        else:
            rows.append([index])
            room.append(length - size)
    return PackedRows(samples, rows, length)


def _packed_row(samples: Texts, indices: list[int], length: int) -> PackedRow:
    tokens = torch.zeros(length, dtype=torch.int64)
    positions = torch.zeros(length, dtype=torch.int64)
    document = torch.full((length,), -1, dtype=torch.int64)
    answer = torch.zeros(length, dtype=torch.bool)
    start = 0
    for number, index in enumerate(indices):
        sample = samples[index][:length]
        end = start + len(sample)
        tokens[start:end] = sample
        positions[start:end] = torch.arange(len(sample))
        document[start:end] = number
        answer[start + int(samples.answer_start[index]) : end] = True
        start = end
    return PackedRow(tokens, positions, document, answer)


def collate(rows: Sequence[PackedRow]) -> Batch:
    """Stack rows into a batch."""
    return Batch(
        torch.stack([r.tokens_L for r in rows]),
        torch.stack([r.positions_L for r in rows]),
        torch.stack([r.document_L for r in rows]),
        torch.stack([r.answer_L for r in rows]),
    )
