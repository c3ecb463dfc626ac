"""The target's outputs on disk, by row, in shards of safetensors.

A folder has `manifest.json`, which describes what the rows are outputs of, and shards
`outputs-WW-NNNNN.safetensors`, WW the number of the process that wrote it. A shard counts once its
seal, a .json of the same name, exists, so a kill leaves no half shard. Rows are found by content,
so they serve every run that packs the same rows.
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from align.outputs.row import RowKey, RowOutputs
from specalign.common.errors import UserError, system_number
from specalign.common.files import sha256_file, write_atomically, write_json, write_text
from specalign.common.schema import convert, read_object
from specalign.common.text import say
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig

SHARD_BYTES = 1 << 26
"""A shard is written when its rows have this many bytes: what a kill loses at most."""
_HEADER_BYTES = 128
"""Bytes of a shard's header for one tensor, at most."""
_OTHER = "give another trainer.features_path"


@dataclass(frozen=True)
class ShardSeal:
    """rows: key and temperature of each row in the shard, in order."""

    rows: list[list[Any]]
    bytes: int
    sha256: str


def describe_outputs(target: Target, config: BlockConfig | None, dtype: str) -> dict[str, Any]:
    """What the rows are outputs of."""
    return {
        "target_sha256": target.hash,
        "target_dtype": target.dtype_name,
        "context": None if config is None else config.context,
        "layers": [] if config is None else list(config.target_layer_ids),
        "dtype": dtype,
        "top_k": None,  # of earlier versions: tokens of p, if not all
    }


class OutputStore:
    """Rows on disk, up to a limit of bytes. `flush` writes those that wait.

    Args:
        folder: created with the first shard. description: from `describe_outputs`.
        gigabytes: limit of all shards, 1e9 bytes each; further rows are not stored.
        writer: the number of this process among the `writers` that share the remaining room evenly.

    Raises:
        UserError: the folder holds outputs of something else.
    """

    def __init__(
        self,
        folder: Path,
        description: dict[str, Any],
        gigabytes: float,
        writer: int = 0,
        writers: int = 1,
    ) -> None:
        self.folder, self.writer, self.full = folder, writer, False
        self.manifest, self.description = folder / "manifest.json", description
        self._places: dict[RowKey, tuple[Path, int]] = {}
        self._seals: dict[Path, ShardSeal] = {}
        self._checked: set[Path] = set()
        self._waiting: dict[RowKey, RowOutputs] = {}
        seals = sorted(folder.glob("outputs-*.json"))
        self._check_manifest(bool(seals))
        for path in seals:
            self._read_seal(path)
        self.limit = self.bytes + (int(gigabytes * 1e9) - self.bytes) // writers
        ends = [path.stem[-5:] for path in folder.glob(f"outputs-{writer:02d}-*.json")]
        self._next = max((int(end) for end in ends if end.isdecimal()), default=-1) + 1

    def _check_manifest(self, has_shards: bool) -> None:
        path = self.manifest
        if not path.exists():  # written with the first shard
            if has_shards:
                raise UserError(f"{path} is missing: remove the outputs there, or {_OTHER}")
            return
        found = read_object(path)
        for key, value in self.description.items():
            if found.get(key) != value:
                raise UserError(
                    f"{path}: {key} is {found.get(key)!r}, here it would be {value!r}; {_OTHER}"
                )

    def _read_seal(self, path: Path) -> None:
        shard = path.with_suffix(".safetensors")
        try:
            seal: ShardSeal = convert(read_object(path), ShardSeal, "", str(path))
            keys = [(str(digest), float(temperature)) for digest, temperature in seal.rows]
        except (UserError, ValueError, TypeError, OverflowError):
            self._remove(shard, "has a seal that can't be read")
            return
        if not shard.exists() or shard.stat().st_size != seal.bytes:
            self._remove(shard, "is missing or torn")
            return
        self._add(shard, seal, keys)

    def _add(self, shard: Path, seal: ShardSeal, keys: list[RowKey]) -> None:
        self._seals[shard] = seal
        self._places |= {key: (shard, index) for index, key in enumerate(keys)}

    def _remove(self, shard: Path, why: str) -> None:
        say(f"warning: {shard} {why}; its rows count as not stored", error=True)
        shard.with_suffix(".json").unlink(missing_ok=True)
        shard.unlink(missing_ok=True)
        self._seals.pop(shard, None)
        self._places = {key: place for key, place in self._places.items() if place[0] != shard}

    @property
    def bytes(self) -> int:
        """Size of all shards on disk."""
        return sum(seal.bytes for seal in self._seals.values())

    def __contains__(self, key: RowKey) -> bool:
        return key in self._places or key in self._waiting

    def __len__(self) -> int:
        return len(self._places) + len(self._waiting)

    def get(self, key: RowKey) -> RowOutputs | None:
        """A row, its tensors memory-mapped, or None. A shard is checked when it is first opened.

        Raises:
            OSError: the system can't read it now.
        """
        if key in self._waiting:
            return self._waiting[key]
        if key not in self._places:
            return None
        shard, index = self._places[key]
        try:
            if shard not in self._checked:
                if sha256_file(shard) != self._seals[shard].sha256:
                    raise ValueError("it has changed since it was written")
                self._checked.add(shard)
            file, names = _open_shard(shard)
            tensors = {name.partition(".")[2]: file.get_tensor(name) for name in names[index]}
            return RowOutputs.from_named(tensors)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            if system_number(error) not in (None, errno.ENOENT):  # too many open files, for example
                raise
            self._remove(shard, f"is damaged ({error})")
            return None

    def put(self, key: RowKey, row: RowOutputs) -> bool:
        """Store a row; False if there is no room."""
        waiting = sum(map(_count_stored_bytes, (*self._waiting.values(), row)))
        if self.full or self.bytes + waiting + _HEADER_BYTES > self.limit:
            self.full = True
            return False
        self._waiting[key] = row
        if waiting >= SHARD_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Write the rows that wait as one shard. Raises OSError."""
        if not self._waiting:
            return
        if not self.manifest.exists():
            write_json(self.manifest, self.description)
        shard = self.folder / f"outputs-{self.writer:02d}-{self._next:05d}.safetensors"
        tensors = {
            f"{i}.{name}": tensor.cpu().contiguous()
            for i, row in enumerate(self._waiting.values())
            for name, tensor in row.to_named().items()
        }
        write_atomically(shard, lambda part: save_file(tensors, str(part)))
        keys = list(self._waiting)
        seal = ShardSeal([list(key) for key in keys], shard.stat().st_size, sha256_file(shard))
        write_text(shard.with_suffix(".json"), json.dumps(asdict(seal)) + "\n")
        self._checked.add(shard)
        self._add(shard, seal, keys)
        self._waiting = {}
        self._next += 1


@lru_cache(maxsize=8)
def _open_shard(shard: Path) -> tuple[Any, dict[int, list[str]]]:
    """The shard and the names of each row's tensors in it."""
    file = safe_open(shard, "pt")
    names = defaultdict[int, list[str]](list)
    for name in file.keys():  # noqa: SIM118 (no dict)
        names[int(name.partition(".")[0])].append(name)
    return file, names


def _count_stored_bytes(row: RowOutputs) -> int:
    """Size of a row in a shard, at most."""
    return row.bytes + _HEADER_BYTES * len(row.to_named())
