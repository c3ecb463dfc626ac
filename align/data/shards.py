"""Target-written text on disk, and packed rows made from it.

A data folder holds `shard-00000.safetensors …` and `manifest.json`. A shard's tensors: tokens (N,), uint16 where all of them
fit, else int32, offsets int64 (M+1,), answer_start int32 (M,) counted within the sample, temperature float32 (M,), and of given
conversations text_start int32 (M,). Sample i is `tokens[offsets[i]:offsets[i+1]]`; its answer begins at `answer_start[i]`, its first
user text at `text_start[i]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from align.common.commands import command
from align.common.errors import UserError
from align.common.files import load_safetensors, sha256_file, write_atomically, write_text
from align.common.schema import convert, read_json
from align.common.text import short


@dataclass
class Samples:
    """M samples end to end: tokens (N,), offsets (M+1,), answer_start (M,), temperature (M,), `NOT_WRITTEN` of text that is
    not the target's; text_start (M,), where the first user text begins, None where that is behind the bare template's start."""

    tokens: Tensor
    offsets: Tensor
    answer_start: Tensor
    temperature: Tensor
    text_start: Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Tensor:
        """The tokens of one sample, int64."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]].long()

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sample, (M,)."""
        return self.offsets.diff()

    @property
    def token_count(self) -> int:
        return len(self.tokens)

    def select(self, indices: Sequence[int] | Tensor) -> Samples:
        """The samples at `indices`, in that order."""
        chosen = [int(i) for i in indices]
        return from_lists(
            [self[i] for i in chosen],
            [int(self.answer_start[i]) for i in chosen],
            [float(self.temperature[i]) for i in chosen],
        )


@dataclass
class Index:
    """What is known of the M samples of S shards without their tokens: the sample that each shard begins with, and the end,
    (S+1,) int64; lengths (M,) int32, answer_start (M,) int32, temperature (M,) fp32."""

    first_S: Tensor
    lengths_M: Tensor
    answer_start_M: Tensor
    temperature_M: Tensor

    def __len__(self) -> int:
        return len(self.lengths_M)

    @staticmethod
    def of(shards: Iterable[Samples], before: Index | None = None) -> Index:
        """Of shards, after those of another index."""
        parts = [] if before is None else [before]
        parts += [
            Index(
                torch.tensor([0, len(s)]),
                s.lengths.int(),
                s.answer_start.int(),
                s.temperature.float().clone(),
            )
            for s in shards
        ]
        sizes = [part.first_S.diff() for part in parts]
        nothing = torch.zeros(0, dtype=torch.int32)
        return Index(
            torch.cat([torch.zeros(1, dtype=torch.int64), *sizes]).cumsum(0),
            torch.cat([nothing, *(part.lengths_M for part in parts)]),
            torch.cat([nothing, *(part.answer_start_M for part in parts)]),
            torch.cat([nothing.float(), *(part.temperature_M for part in parts)]),
        )


NOT_WRITTEN = -1.0
"""The temperature of text that the target did not write."""


class ShardSamples:
    """Samples of several shards, whose tokens stay on disk: memory-mapped, read where they are asked for.

    In memory: 20 bytes a sample, whatever its length.

    Args:
        shards: by number.
        about: lengths, starts and temperatures of all their samples.
        chosen_M: which of them these are, and in what order; None = all.
    """

    def __init__(self, shards: Sequence[Samples], about: Index, chosen_M: Tensor | None = None) -> None:
        self.shards, self.about = shards, about
        self.chosen_M = torch.arange(len(about)) if chosen_M is None else chosen_M

    def __len__(self) -> int:
        return len(self.chosen_M)

    def __getitem__(self, index: int) -> Tensor:
        """The tokens of one sample, int64."""
        number = int(self.chosen_M[index])
        shard = int(torch.searchsorted(self.about.first_S, number, right=True)) - 1
        return self.shards[shard][number - int(self.about.first_S[shard])]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each sample, (M,)."""
        return self.about.lengths_M[self.chosen_M]

    @cached_property
    def answer_start(self) -> Tensor:
        """Where the answer of each sample begins, (M,)."""
        return self.about.answer_start_M[self.chosen_M]

    @cached_property
    def temperature(self) -> Tensor:
        """Of each sample, (M,)."""
        return self.about.temperature_M[self.chosen_M]

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum())

    @property
    def tokens(self) -> Tensor:
        """All tokens, copied into memory, (N,) int64."""
        return torch.cat([self[i] for i in range(len(self))])

    def select(self, indices: Sequence[int] | Tensor) -> ShardSamples:
        """The samples at `indices`, in that order; nothing is read."""
        return ShardSamples(
            self.shards, self.about, self.chosen_M[torch.as_tensor(indices, dtype=torch.int64)]
        )


Texts = Samples | ShardSamples


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


class _Always(TypedDict):
    shards: int
    samples: int
    tokens: int
    seed: int
    prompt_temperature: float
    answer_temperatures: list[float]


class Manifest(_Always, total=False):
    """What a manifest holds that is read; the other settings that the samples were written with come to it."""

    answer_tokens: int
    dropped: dict[str, int]
    finished: bool
    ended: bool
    """The prompts have ended, whatever was asked for."""
    sha256: list[str]
    """Of each shard; a manifest of old has none."""
    target: str
    target_sha256: str | None
    """None where a server wrote and the weights were not on this machine."""
    writer: str
    top_p: float
    top_k: int


def sha256_of(manifest: dict[str, Any], shard: int) -> str | None:
    """What the manifest says that a shard hashes to."""
    known = manifest.get("sha256", [])
    return known[shard] if shard < len(known) else None


def shard_path(folder: Path, index: int) -> Path:
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(folder: Path, index: int, samples: Samples) -> str:
    """Write one shard, atomically; its sha256."""
    narrow = len(samples.tokens) and int(samples.tokens.long().max()) < 1 << 16
    tensors = {
        "tokens": samples.tokens.to(torch.uint16 if narrow else torch.int32),
        "offsets": samples.offsets,
        "answer_start": samples.answer_start.to(torch.int32),
        "temperature": samples.temperature.to(torch.float32),
    }
    if samples.text_start is not None:
        tensors["text_start"] = samples.text_start.to(torch.int32)
    path = shard_path(folder, index)
    write_atomically(path, lambda part: save_file(tensors, str(part)))
    return sha256_file(path)


def read_shard(
    path: Path, sha256: str | None = None, vocabulary: int | None = None, checked: bool = False
) -> Samples:
    """One shard.

    Args:
        sha256: what the manifest says of it; None = nothing, a manifest of old.
        vocabulary: every token is less.
        checked: this process has read it before; its content is not looked at again.

    Raises:
        UserError: it is missing, torn, no shard, or not as it was written; align.synthesize mends each.
    """
    try:
        if not checked and sha256 is not None and path.exists() and sha256_file(path) != sha256:
            raise ValueError("it has changed since it was written")
        tensors = load_safetensors(path)  # memory-mapped
        found = Samples(
            tensors["tokens"],
            tensors["offsets"].long(),
            tensors["answer_start"].long(),
            tensors["temperature"].float(),
            tensors["text_start"].long() if "text_start" in tensors else None,
        )
        if not checked and (why := _nonsense(found, vocabulary)):
            raise ValueError(why)
        return found
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise UserError(
            f"{path}: not a readable data shard ({error}); align.synthesize with the same words writes it again"
        ) from None


def _nonsense(s: Samples, vocabulary: int | None) -> str | None:
    """Why these tensors are no samples, or None."""
    tensors = [tensor for tensor in vars(s).values() if tensor is not None]
    if any(tensor.dim() != 1 for tensor in tensors) or len(s.offsets) == 0:
        return "its tensors have the wrong shape"
    lengths = s.offsets.diff()
    if int(s.offsets[0]) != 0 or int(s.offsets[-1]) != len(s.tokens) or bool((lengths < 0).any()):
        return "its offsets do not rise from 0 to the number of tokens"
    if any(len(tensor) != len(s) for tensor in tensors[2:]):
        return "its tensors disagree on the number of samples"
    if bool(((s.answer_start < 0) | (s.answer_start > lengths)).any()):
        return "an answer begins outside its sample"
    tokens = s.tokens.int() if s.tokens.dtype == torch.uint16 else s.tokens
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= (vocabulary or 2**31)):
        return f"token {int(tokens.max())} is none of the target's {vocabulary}"
    return None


def read_manifest(folder: Path, schema: type = Manifest, missing: str = "") -> dict[str, Any]:
    """The folder's manifest. Raises UserError where it is missing, which `missing` puts into words, or broken."""
    path = folder / "manifest.json"
    if not path.exists():
        missing = missing or f"no data; write some with {command('align.synthesize')}"
        raise UserError(f"{folder}: no manifest.json, so {missing}")
    found: dict[str, Any] = convert(read_json(path), schema, "", str(path))
    if not 0 <= found.get("shards", 0) < 1 << 31:
        raise UserError(
            f"{path}: shards={short(found['shards'], 20)} must be a whole number from 0, below 2^31"
        )
    return found


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / "manifest.json", text)
