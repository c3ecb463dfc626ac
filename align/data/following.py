"""Shards in the order in which they are written, while they are: training and writing at once, or in turn."""

from __future__ import annotations

import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from align.common.batch import PackedRow
from align.common.claims import Claim
from align.common.commands import command
from align.common.errors import UserError
from align.common.text import say
from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.packing import PackedRows, pack
from align.data.shards import Index, Samples, ShardSamples, Texts
from align.data.synthesis import Synthesis
from align.target.model import Target

WAIT = 0.5
"""Seconds between looks at what another process writes."""


class ShardsAsWritten:
    """The shards of a folder by number, those to come too.

    A shard that is not there yet is waited for while another process writes; where nobody does, it is written here. What it
    holds depends on the seed and its number alone, so who wrote it makes no difference.
    """

    def __init__(self, recipe: Recipe, target: Target, folder: Path, quiet: bool = False) -> None:
        self.recipe, self.target, self.folder, self.quiet = recipe, target, folder, quiet
        self.next = 0
        self._writing: Synthesis | None = None

    def first(self, count: int) -> ShardSamples:
        """The samples of the first `count` shards; `take` goes on after them.

        Raises:
            UserError: they hold none.
        """
        shards: list[Samples] = []
        while len(shards) < count and (shard := self.take()) is not None:
            shards.append(shard)
        found = ShardSamples(shards, Index.of(shards))
        if not len(found):
            raise UserError(f"{self.folder}: its first {count} shards hold no sample")
        return found

    def take(self) -> Samples | None:
        """The next shard; None after the last one.

        Raises:
            UserError: a shard that can't be read, or one that nobody writes.
        """
        while True:
            manifest = self._manifest()
            if self.next < manifest["shards"]:
                path = data.shard_path(self.folder, self.next)
                found = data.read_shard(path, data.sha256_of(manifest, self.next), self.target.vocab_size)
                self.next += 1
                return found
            if manifest["samples"] >= self.recipe.data.samples or manifest.get("ended"):
                return None
            if not self._write():
                time.sleep(WAIT)

    def _manifest(self) -> dict[str, Any]:
        there = (self.folder / "manifest.json").exists()
        return data.read_manifest(self.folder) if there else {"shards": 0, "samples": 0}

    def _write(self) -> bool:
        """Write one shard; False where another process is at it."""
        if not main_process():
            return False
        try:
            claim = Claim(self.folder, "data.path")
        except UserError:
            return False
        with claim:
            manifest = self._manifest()
            if self.next < manifest["shards"]:
                return True
            if self.recipe.data.write == "never":
                raise UserError(
                    f"{self.folder}: shard {self.next} is not there and nobody writes it (data.write=never); start "
                    f"{command('align.synthesize')} with the same words, then this command goes on"
                )
            if self._writing is None or self._writing.manifest["shards"] != manifest["shards"]:
                if not self.quiet and self._writing is None:
                    say(f"nobody writes into {self.folder}: writing and training in turn", error=True)
                if self._writing is not None:
                    self._writing.close()
                self._writing = Synthesis(self.recipe, self.target, self.folder, self.quiet)
            if not self._writing.done:
                self._writing.write_shard()
            if self._writing.done:
                self._writing.close()
        return True


class Followed:
    """The rows of each shard in turn, in a seeded order; after the last shard one permutation of all rows after another.

    A place's row depends on the shards up to it alone, not on when they came.

    Args:
        first: samples of the first shards, one group. later: the shards after them.
    """

    def __init__(self, first: Texts, later: ShardsAsWritten, length: int, seed: int) -> None:
        self.later, self.length, self.seed, self.ended = later, length, seed, False
        self.groups: list[PackedRows] = []
        self.starts = [0]
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._add(first)

    def _add(self, samples: Texts) -> None:
        rows = pack(samples, self.length, self.seed)
        self.groups.append(rows)
        self.starts.append(self.starts[-1] + len(rows))

    def _order(self, kind: int, number: int, size: int) -> np.ndarray:
        key = (kind, number)
        if key not in self._orders:
            while len(self._orders) > 1:  # a step may span two of them, seldom more
                self._orders.pop(next(iter(self._orders)))
            self._orders[key] = np.random.default_rng([self.seed, kind, number]).permutation(size)
        return self._orders[key]

    def key(self, place: int) -> int:
        while place >= self.starts[-1] and not self.ended:
            shard = self.later.take()
            if shard is None:
                self.ended = True
            else:
                self._add(shard)
        if place < self.starts[-1]:
            group = bisect_right(self.starts, place) - 1
            first = self.starts[group]
            return first + int(self._order(8, group, len(self.groups[group]))[place - first])
        epoch, index = divmod(place, self.starts[-1])
        return int(self._order(1, epoch, self.starts[-1])[index])

    def row(self, key: int) -> PackedRow:
        group = bisect_right(self.starts, key) - 1
        return self.groups[group][key - self.starts[group]]
