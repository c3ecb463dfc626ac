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

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.common.errors import UserError
from align.common.files import write_atomically


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
