"""The samples of a data folder, checked when it is opened."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from align.data.shards import Samples, ShardSamples, read_manifest, read_shard, shard_path
from specalign.common.errors import UserError

OPEN_SHARDS = 8192
"""A process may map some 65,000 files."""


class ShardFolder:
    """The shards of a folder by number, each checked when it is opened. `[]` raises UserError for a
    shard that is missing, torn, or has changed since it was written."""

    def __init__(
        self, folder: Path, manifest: dict[str, Any], vocabulary: int | None = None
    ) -> None:
        self.folder, self.manifest, self.vocabulary = folder, manifest, vocabulary
        self._open = lru_cache(OPEN_SHARDS)(self._read)

    def __len__(self) -> int:
        return int(self.manifest["shards"])

    def __getitem__(self, index: int) -> Samples:
        return self._open(index)

    def _read(self, index: int) -> Samples:
        sha256 = self.manifest["sha256"][index]
        return read_shard(shard_path(self.folder, index), sha256, self.vocabulary)


def read_samples(
    folder: Path, vocabulary: int | None = None, manifest: dict[str, Any] | None = None
) -> ShardSamples:
    """All samples of a data folder in writing order.

    Args:
        vocabulary: an upper bound of the token ids.
        manifest: the folder's, if it is of another kind.

    Raises:
        UserError: no folder, no manifest, a missing or damaged shard, or no sample.
    """
    samples = ShardSamples.of(ShardFolder(folder, manifest or read_manifest(folder), vocabulary))
    if len(samples) == 0:
        raise UserError(f"{folder}: holds no sample; remove it, or give another data.path")
    return samples
