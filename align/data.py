"""Target-written text on disk, and packed rows made from it.

A data folder holds `shard-00000.safetensors …` and `manifest.json`. A shard's tensors: tokens int32 (N,), offsets
int64 (M+1,), answer_start int32 (M,) counted within the sample, temperature float32 (M,). Sample i is
`tokens[offsets[i]:offsets[i+1]]`; its answer begins at `answer_start[i]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.errors import UserError
from align.files import write_atomically


@dataclass
class Samples:
    """M samples end to end: tokens (N,) int64, offsets (M+1,), answer_start (M,), temperature (M,)."""

    tokens: Tensor
    offsets: Tensor
    answer_start: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def select(self, indices: Sequence[int]) -> Samples:
        """The samples at `indices`, in that order."""
        return from_lists(
            [self[i] for i in indices],
            [int(self.answer_start[i]) for i in indices],
            [float(self.temperature[i]) for i in indices],
        )


def from_lists(
    samples: Sequence[Tensor | Sequence[int]], starts: Sequence[int], temperatures: Sequence[float]
) -> Samples:
    """Samples from token lists, the index where each answer begins, and the temperature it was written at."""
    parts = [torch.as_tensor(s, dtype=torch.int64) for s in samples]
    offsets = torch.zeros(len(parts) + 1, dtype=torch.int64)
    if parts:
        offsets[1:] = torch.tensor([len(p) for p in parts]).cumsum(0)
    tokens = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return Samples(
        tokens, offsets, torch.tensor(list(starts), dtype=torch.int64), torch.tensor(list(temperatures))
    )


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, samples: Samples) -> None:
    """Write one shard, atomically."""
    tensors = {
        "tokens": samples.tokens.to(torch.int32),
        "offsets": samples.offsets,
        "answer_start": samples.answer_start.to(torch.int32),
        "temperature": samples.temperature.to(torch.float32),
    }
    write_atomically(shard_path(folder, index), lambda part: save_file(tensors, str(part)))


def read_shard(path: Path) -> Samples:
    """One shard. Raises UserError when the file is torn or not a shard."""
    try:
        tensors = load_file(str(path))
        return Samples(
            tensors["tokens"].long(),
            tensors["offsets"],
            tensors["answer_start"].long(),
            tensors["temperature"].float(),
        )
    except (SafetensorError, OSError, KeyError) as error:
        raise UserError(
            f"{path}: not a readable data shard ({error}); remove it and run align.synthesize again"
        ) from None


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest. Raises UserError where it is missing or broken."""
    path = folder / "manifest.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{folder}: no manifest.json, so no data; write some with python -m align.synthesize"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable JSON ({error})") from None


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / "manifest.json", lambda part: part.write_text(text))


def read_samples(folder: Path) -> Samples:
    """All samples of a data folder, in writing order.

    Raises:
        UserError: no folder, no manifest, a missing or torn shard, or no sample at all.
    """
    manifest = read_manifest(folder)
    shards = [read_shard(shard_path(folder, i)) for i in range(int(manifest["shards"]))]
    count = sum(len(s) for s in shards)
    if count == 0:
        raise UserError(f"{folder}: holds no sample; write some with python -m align.synthesize")
    lengths = torch.cat([s.offsets.diff() for s in shards])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Samples(
        torch.cat([s.tokens for s in shards]),
        offsets,
        torch.cat([s.answer_start for s in shards]),
        torch.cat([s.temperature for s in shards]),
    )


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


@dataclass
class PackedRow:
    """A row of L positions: tokens, positions within the document, document number (-1 = padding), answer flag."""

    tokens_L: Tensor
    positions_L: Tensor
    document_L: Tensor
    answer_L: Tensor


@dataclass
class Batch:
    """B packed rows; the fields are those of `PackedRow`, stacked."""

    tokens_BL: Tensor
    positions_BL: Tensor
    document_BL: Tensor
    answer_BL: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(
            *(t.to(device) for t in (self.tokens_BL, self.positions_BL, self.document_BL, self.answer_BL))
        )

    def row(self, index: int) -> Batch:
        """One row, as a batch of one."""
        fields = (self.tokens_BL, self.positions_BL, self.document_BL, self.answer_BL)
        return Batch(*(t[index : index + 1] for t in fields))

    def attention_mask(self) -> Tensor:
        """bool (B, 1, L, L): causal, within one document; a padding position sees itself alone."""
        length = self.tokens_BL.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.tokens_BL.device).tril()
        same = self.document_BL[:, :, None] == self.document_BL[:, None, :]
        real = (self.document_BL >= 0)[:, None, :]
        own = torch.eye(length, dtype=torch.bool, device=self.tokens_BL.device)
        return ((causal & same & real) | own)[:, None]


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
