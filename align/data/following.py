"""Shards in the order of writing, while another process writes them."""

from __future__ import annotations

import time
from bisect import bisect_right
from pathlib import Path

from align.config.hardware import main_process
from align.config.recipe import Recipe
from align.data import shards as data
from align.data.packing import PackedRows, pack
from align.data.shards import Manifest, Samples, ShardSamples, Texts
from align.data.stream import seeded_permutation
from align.data.synthesis import synthesize
from specalign.common.batch import PackedRow
from specalign.common.claims import Claim
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.text import say
from specalign.lm.model import Target

WAIT_SECONDS = 0.5
"""Between looks at what another process writes."""


class ShardsAsWritten:
    """The shards of a folder by number, including those still to come.

    A missing shard is awaited while another process writes; else all missing ones are written here.
    Their content depends on the seed and their number alone, so it does not matter who wrote them.
    """

    def __init__(self, recipe: Recipe, target: Target, folder: Path, quiet: bool = False) -> None:
        self.recipe, self.target, self.folder, self.quiet = recipe, target, folder, quiet
        self.next = 0

    def take_first(self, count: int) -> ShardSamples:
        """The samples of the first `count` shards; `take` continues after them. Raises UserError:
        they hold none."""
        shards: list[Samples] = []
        while len(shards) < count and (shard := self.take()) is not None:
            shards.append(shard)
        samples = ShardSamples.of(shards)
        if not len(samples):
            raise UserError(f"{self.folder}: its first {count} shards hold no sample")
        return samples

    def take(self) -> Samples | None:
        """The next shard; None after the last one. Raises UserError: a shard that can't be read, or
        that nobody writes."""
        while True:
            manifest = self._read_manifest()
            if self.next < manifest["shards"]:
                path, sha256 = data.shard_path(self.folder, self.next), manifest["sha256"]
                self.next += 1
                return data.read_shard(path, sha256[self.next - 1], self.target.vocab_size)
            if manifest["samples"] >= self.recipe.data.samples or manifest.get("ended"):
                return None
            if not main_process() or not self._write():
                time.sleep(WAIT_SECONDS)

    def _read_manifest(self) -> Manifest:
        exists = (self.folder / "manifest.json").exists()
        return data.read_manifest(self.folder) if exists else {"shards": 0, "samples": 0}

    def _write(self) -> bool:
        """Write what is missing; False if another process is writing."""
        try:
            claim = Claim(self.folder, "data.path")
        except UserError:
            return False
        with claim:
            if self.next < self._read_manifest()["shards"]:
                return True
            if self.recipe.data.write == "never":
                raise UserError(
                    f"{self.folder}: shard {self.next} is missing and nobody writes it "
                    f"(data.write=never); start {command('align.synthesize')} with the same "
                    "arguments, then rerun this command"
                )
            if not self.quiet:
                say(f"no process writes into {self.folder}: what is missing is written", error=True)
            synthesize(self.recipe, self.target, self.folder, self.quiet)
        return True


class Followed:
    """The rows of each shard in turn, in a seeded order; after the last shard, permutations of all
    rows. The row at a place depends on the shards up to it, not on when they came.

    Args:
        first: samples of the first shards, one group.
        later: the shards after them.
    """

    def __init__(self, first: Texts, later: ShardsAsWritten, length: int, seed: int) -> None:
        self.later, self.length, self.seed, self.ended = later, length, seed, False
        self.groups: list[PackedRows] = []
        self.starts = [0]
        self._add(first)

    def _add(self, samples: Texts) -> None:
        rows = pack(samples, self.length, self.seed)
        self.groups.append(rows)
        self.starts.append(self.starts[-1] + len(rows))

    def key(self, place: int) -> int:
        while place >= self.starts[-1] and not self.ended:
            shard = self.later.take()
            if shard is None:
                self.ended = True
            else:
                self._add(shard)
        if place < self.starts[-1]:
            group = bisect_right(self.starts, place) - 1
            first, size = self.starts[group], len(self.groups[group])
            return first + int(seeded_permutation(size, self.seed, 8, group)[place - first])
        epoch, index = divmod(place, self.starts[-1])
        return int(seeded_permutation(self.starts[-1], self.seed, 1, epoch)[index])

    def row(self, key: int) -> PackedRow:
        group = bisect_right(self.starts, key) - 1
        return self.groups[group][key - self.starts[group]]
