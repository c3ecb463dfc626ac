"""Samples of token ids, and their shards on disk.

A data folder holds `shard-00000.safetensors …` and `manifest.json`. Tensors of a shard: tokens
(N,), uint16 if all of them fit, else int32; offsets (M+1,) int64; answer_start (M,) int32, counted
within the sample; temperature (M,) float32. Sample i is `tokens[offsets[i]:offsets[i+1]]`; its
answer begins at `answer_start[i]`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.files import load_safetensors, sha256_file, write_atomically, write_text
from specalign.common.schema import JsonObject, convert, read_json
from specalign.common.text import short

NOT_WRITTEN = -1.0
"""The temperature of text that the target did not write."""


@dataclass
class Samples:
    """M samples end to end: tokens (N,), offsets (M+1,), answer_start (M,), temperature (M,)."""

    tokens: Tensor
    offsets: Tensor
    answer_start: Tensor
    temperature: Tensor

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        """The tokens of one sample, int64."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].long()

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample, (M,)."""
        return self.offsets.diff()


@dataclass(eq=False)
class ShardSamples:
    """M samples of S shards, whose tokens stay on disk: memory-mapped, read on demand.

    first_S: the number of each shard's first sample, and the end, (S+1,). chosen_M: the numbers of
    these samples. lengths, answer_start, temperature: of each, (M,).
    """

    shards: Sequence[Samples]
    first_S: Tensor
    chosen_M: Tensor
    lengths: Tensor
    answer_start: Tensor
    temperature: Tensor

    @classmethod
    def of(cls, shards: Sequence[Samples]) -> ShardSamples:
        """All samples of the shards."""
        first_S = torch.tensor([0, *map(len, shards)]).cumsum(0)
        return cls(
            shards,
            first_S,
            torch.arange(int(first_S[-1])),
            torch.cat([shard.lengths.int() for shard in shards]),
            torch.cat([shard.answer_start.int() for shard in shards]),
            torch.cat([shard.temperature for shard in shards]),
        )

    def __len__(self) -> int:
        return len(self.chosen_M)

    def __getitem__(self, index: int) -> Tensor:
        """The tokens of one sample, int64."""
        number = int(self.chosen_M[index])
        shard = int(torch.searchsorted(self.first_S, number, right=True)) - 1
        return self.shards[shard][number - int(self.first_S[shard])]

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum())

    def select(self, indices: Sequence[int] | Tensor) -> ShardSamples:
        """The samples at `indices`, in that order; nothing is read."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        fields = (self.chosen_M, self.lengths, self.answer_start, self.temperature)
        return ShardSamples(self.shards, self.first_S, *(values[chosen] for values in fields))


Texts = Samples | ShardSamples


def from_lists(
    samples: Sequence[Tensor | Sequence[int]], starts: Sequence[int], temperatures: Sequence[float]
) -> Samples:
    """Samples from token lists, where each answer begins, and the temperature it was written at."""
    parts = [torch.as_tensor(sample, dtype=torch.int64) for sample in samples]
    return Samples(
        torch.cat([torch.zeros(0, dtype=torch.int64), *parts]),
        torch.tensor([0, *map(len, parts)]).cumsum(0),
        torch.tensor(starts, dtype=torch.int64),
        torch.tensor(temperatures, dtype=torch.float32),
    )


Manifest = JsonObject
"""The values of a folder's manifest.json: `ManifestFields`, and the settings of `identity`."""


class FolderFields(TypedDict):
    """The fields of a manifest without which no folder of shards can be read."""

    shards: int
    samples: int
    tokens: int
    sha256: list[str]


class ManifestFields(FolderFields):
    """The fields of a generated folder's manifest that a run needs."""

    seed: int
    prompt_temperature: float
    answer_temperatures: list[float]


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, samples: Samples) -> str:
    """Write one shard atomically; returns its SHA-256."""
    narrow = len(samples.tokens) and int(samples.tokens.long().max()) < 1 << 16
    tensors = {
        "tokens": samples.tokens.to(torch.uint16 if narrow else torch.int32),
        "offsets": samples.offsets,
        "answer_start": samples.answer_start.to(torch.int32),
        "temperature": samples.temperature.float(),
    }
    path = shard_path(folder, index)
    write_atomically(path, lambda part: save_file(tensors, str(part)))
    return sha256_file(path)


def read_shard(path: Path, sha256: str, vocabulary: int | None = None) -> Samples:
    """One shard, memory-mapped. `vocabulary`: an upper bound of the token ids. Raises UserError: it
    is missing, torn, or not as it was written."""
    try:
        if path.exists() and sha256_file(path) != sha256:
            raise ValueError("it has changed since it was written")
        tensors = load_safetensors(path)
        samples = Samples(
            tensors["tokens"],
            tensors["offsets"].long(),
            tensors["answer_start"].long(),
            tensors["temperature"].float(),
        )
        largest = int(samples.tokens.long().max()) if len(samples.tokens) else 0
        if vocabulary is not None and largest >= vocabulary:
            raise ValueError(f"token {largest} is not in the target's vocabulary of {vocabulary}")
        return samples
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: not a readable data shard ({error}); delete {path.parent}, or choose another "
            "data.path"
        ) from None


def read_manifest(folder: Path, schema: type = ManifestFields) -> Manifest:
    """The folder's manifest. Raises UserError if it is missing or broken."""
    path = folder / "manifest.json"
    if not path.exists():
        writing = command("align.synthesize")
        raise UserError(f"{folder}: no manifest.json, so no data; generate it with {writing}")
    manifest: Manifest = convert(read_json(path), schema, "", str(path))
    if not 0 <= manifest["shards"] == len(manifest["sha256"]):
        shards = short(manifest["shards"], 20)
        raise UserError(f"{path}: shards={shards}, but sha256 lists {len(manifest['sha256'])}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / "manifest.json", text)


def read_samples(
    folder: Path, vocabulary: int | None = None, manifest: Manifest | None = None
) -> ShardSamples:
    """All samples of a data folder in writing order. Raises UserError: no manifest, a missing or
    damaged shard, or no sample.

    Args:
        vocabulary: an upper bound of the token ids.
        manifest: the folder's, if it is of another kind.
    """
    hashes = (manifest or read_manifest(folder))["sha256"]
    shards = [read_shard(shard_path(folder, i), h, vocabulary) for i, h in enumerate(hashes)]
    if not any(map(len, shards)):
        raise UserError(f"{folder}: contains no samples; delete it, or choose another data.path")
    return ShardSamples.of(shards)
