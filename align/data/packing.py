"""Samples as packed rows of one length, and the share that is held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from align.common.batch import Batch, PackedRow
from align.common.errors import UserError
from align.data.shards import Samples


def split_validation(samples: Samples, fraction: float) -> tuple[Samples, Samples]:
    """(training, validation): a random share of whole samples is held out; at least one on each side.

    Always the same share, whatever the run's seed: runs that differ in it are compared on the same text, and one that starts
    from another's drafter is not validated on what that was trained on.
    """
    if len(samples) < 2:
        raise UserError("data: at least 2 samples are needed to hold one out for validation")
    order = np.random.default_rng([0, 0x5EED]).permutation(len(samples))
    held = min(max(1, round(fraction * len(samples))), len(samples) - 1)
    return samples.select(sorted(order[held:].tolist())), samples.select(sorted(order[:held].tolist()))


def pack(samples: Samples, length: int, seed: int) -> list[PackedRow]:
    """Pack samples, in a seeded order, into rows of `length`: first fit over the last open rows; longer ones are cut."""
    order = np.random.default_rng([seed, 0xACC]).permutation(len(samples))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order.tolist():
        size = min(len(samples[index]), length)
        for r in range(max(0, len(rows) - 64), len(rows)):
            if room[r] >= size:
                rows[r].append(index)
                room[r] -= size
                break
        else:
            rows.append([index])
            room.append(length - size)
    return [_packed_row(samples, row, length) for row in rows]


def _packed_row(samples: Samples, indices: list[int], length: int) -> PackedRow:
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
