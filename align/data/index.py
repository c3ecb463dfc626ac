"""All samples of a data folder, opened without reading their tokens: an index beside the shards, built once.

`index.safetensors` holds the fields of `Index`, and of each shard its size and time of change. It is a help, not a source: what it
says is used for shards whose hash in the manifest, size and time are those that it was built from, and everything else is read again.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from align.common.errors import UserError
from align.common.files import check_ordinary, write_atomically
from align.data.shards import Index, Samples, ShardSamples, read_manifest, read_shard, sha256_of, shard_path

OPEN = 8192
"""Shards that are kept open; a process may map some 65,000 files."""


class ShardFolder(Sequence[Samples]):
    """The shards of a folder by number, each opened where it is asked for, and checked when it is opened first.

    Raises:
        UserError: from `[]`: a shard that is missing or torn, or has changed since it was written.
    """

    def __init__(self, folder: Path, manifest: dict[str, Any], vocabulary: int | None = None) -> None:
        self.folder, self.manifest, self.vocabulary = folder, manifest, vocabulary
        self._open: OrderedDict[int, Samples] = OrderedDict()
        self._good: set[int] = set()

    def __len__(self) -> int:
        return int(self.manifest["shards"])

    @overload
    def __getitem__(self, index: int) -> Samples: ...
    @overload
    def __getitem__(self, index: slice) -> list[Samples]: ...
    def __getitem__(self, index: int | slice) -> Samples | list[Samples]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._open:
            sha256 = sha256_of(self.manifest, index)
            self._open[index] = read_shard(
                shard_path(self.folder, index), sha256, self.vocabulary, checked=index in self._good
            )
            self._good.add(index)
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]

    def __iter__(self) -> Iterator[Samples]:
        return (self[i] for i in range(len(self)))

    def state(self, index: int) -> tuple[int, int]:
        """A shard's size in bytes and time of change in ns; (0, 0) where it is missing."""
        try:
            found = shard_path(self.folder, index).stat()
        except OSError:
            return 0, 0
        return found.st_size, found.st_mtime_ns

    def about(self) -> Index:
        """The folder's index, read or built; what is new is written beside the shards, where that can be done.

        Raises:
            UserError: a shard is missing, or has changed since it was written.
        """
        if len(self) and self.state(len(self) - 1) == (0, 0):
            _ = self[len(self) - 1]  # says so, before all others are looked for
        states = torch.tensor([self.state(i) for i in range(len(self))], dtype=torch.int64).view(-1, 2)
        known = self._read()
        count = 0 if known is None else len(known[1])
        changed = [] if known is None else (known[1] != states[:count]).any(1).nonzero()[:, 0].tolist()
        for shard in changed:  # the same bytes where it can be opened: the manifest has its hash
            _ = self[shard]
        if known is not None and not changed and count == len(self):
            return known[0]
        index = Index.of((self[i] for i in range(count, len(self))), None if known is None else known[0])
        if len(self.manifest.get("sha256", [])) >= len(self):
            with suppress(OSError):
                self._write(index, states)
        return index

    def _key(self, shards: int) -> str:
        return hashlib.sha256(json.dumps(self.manifest.get("sha256", [])[:shards]).encode()).hexdigest()

    def _read(self) -> tuple[Index, Tensor] | None:
        """The index on disk and the states (S, 2) of its shards, the first ones of the folder."""
        try:
            check_ordinary(self.folder / "index.safetensors")
            with safe_open(str(self.folder / "index.safetensors"), "pt") as file:
                about = file.metadata() or {}
                found = {name: file.get_tensor(name).clone() for name in (*_FIELDS, "states")}
        except (SafetensorError, OSError):
            return None
        states = found.pop("states")
        whole = about.get("sha256") == _digest(found) and len(states) <= len(self)
        if not whole or about.get("shards") != self._key(len(states)):
            return None
        return Index(**found), states

    def _write(self, index: Index, states: Tensor) -> None:
        fields = {name: getattr(index, name) for name in _FIELDS}
        about = {"sha256": _digest(fields), "shards": self._key(len(states))}
        write_atomically(
            self.folder / "index.safetensors",
            lambda part: save_file({**fields, "states": states}, str(part), about),
        )


_FIELDS = ("first_S", "lengths_M", "answer_start_M", "temperature_M")


def _digest(fields: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in _FIELDS:
        digest.update(fields[name].numpy().tobytes())
    return digest.hexdigest()


def read_samples(
    folder: Path, vocabulary: int | None = None, manifest: dict[str, Any] | None = None
) -> ShardSamples:
    """All samples of a data folder, in writing order; `vocabulary`: every token is less. `manifest`: the folder's, where it is of
    another kind. A shard's content is checked when it is first read, which may be later.

    Raises:
        UserError: no folder, no manifest, a missing or torn shard, or no sample at all.
    """
    shards = ShardFolder(folder, manifest or read_manifest(folder), vocabulary)
    found = ShardSamples(shards, shards.about())
    if len(found) == 0:
        raise UserError(f"{folder}: holds no sample; remove it, or give another data.path")
    return found
