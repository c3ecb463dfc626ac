"""Packed rows with anchors, as a function of (seed, step): resuming is starting at another step.

A step's global batch depends neither on the number of processes nor on the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from align.config.recipe import Recipe
from align.data.packing import collate, pack
from align.data.shards import ShardSamples
from align.data.stream import TEXT, RowStream
from specalign.common.batch import Anchors, Batch, PackedRow, Step
from specalign.common.rng import keyed_generator
from specalign.diffusion.noise import sample_anchors

Place = tuple[int, int]  # (micro-batch, place in the stream = key of the anchors)
_VALIDATION_SEED = 0x7A11D


@dataclass(frozen=True)
class StepSampler:
    """Batch sampler of places from step `start` on, one list per micro-batch.

    Step s takes the places s·G … s·G+G−1 of the stream, split into `accumulate` micro-batches, each
    split into `world` slices of `batch_size` rows, one per process. steps: optimizer steps in all.
    """

    steps: int
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    start: int = 0

    def __len__(self) -> int:
        """All micro-batches of the run: Lightning counts from 0 also after resuming."""
        return self.steps * self.accumulate

    def __iter__(self) -> Iterator[list[Place]]:
        for micro in range(self.start * self.accumulate, len(self)):
            first = (micro * self.world + self.rank) * self.batch_size
            yield [(micro, place) for place in range(first, first + self.batch_size)]

    def shared_places(self, micro: int) -> range:
        """All processes' places of one micro-batch."""
        size = self.world * self.batch_size
        return range(micro * size, (micro + 1) * size)

    def step_places(self, micro: int) -> range:
        """The places of the whole step that a micro-batch belongs to, over all processes."""
        size = self.accumulate * self.world * self.batch_size
        first = micro // self.accumulate * size
        return range(first, first + size)


def count_anchors(row: PackedRow, anchors: int) -> int:
    """The number of anchors that `sample_anchors` finds: positions whose next token is an answer's
    in the same document."""
    same = (row.document_L[1:] == row.document_L[:-1]) & row.answer_L[1:]
    places = same & (row.positions_L[:-1] > 0) & (row.document_L[:-1] >= 0)
    return min(anchors, int(places.sum()))


def make_batch(
    rows: Sequence[PackedRow],
    keys: Sequence[int],
    anchors: int,
    block_size: int,
    seed: int,
    width: int = 0,
) -> tuple[Batch, Anchors]:
    """Stack rows with random anchors, drawn from (seed, key).

    Args:
        anchors: per row. width: the least number of anchor columns; more are kept only if a row
            uses them.
    """
    parts = [
        sample_anchors(collate([row]), anchors, block_size, keyed_generator(seed, 2, key))
        for row, key in zip(rows, keys, strict=True)
    ]
    index_BA = torch.cat([p.index_BA for p in parts])
    valid_BAK = torch.cat([p.valid_BAK for p in parts])
    used_BA = valid_BAK[..., 0]
    columns = max(int(used_BA.sum(1).max()), 1, width)
    keep_BA = used_BA.long().argsort(dim=1, descending=True, stable=True)[:, :columns]
    kept_BAK = valid_BAK.gather(1, keep_BA[..., None].expand(-1, -1, block_size))
    return collate(rows), Anchors(index_BA.gather(1, keep_BA), kept_BAK)


def validation_rows(
    samples: ShardSamples, length: int, count: int, exact: bool
) -> list[tuple[str, PackedRow]]:
    """At most `count` held-out rows with their kind of text, kinds in turn, independent of the
    run's seed.

    `greedy` text was generated at temperature 0 and estimates τ of greedy decoding; `sampling` text
    at temperature 1 and, if `exact`, without top-p and top-k estimates τ of sampling. Each estimate
    is unbiased only on its own text.
    """
    temperature = samples.temperature
    greedy = temperature == 0
    sampling = (temperature == 1) & exact

    def rows(kind: str, chosen: Tensor) -> list[tuple[str, PackedRow]]:
        indices = chosen.nonzero()[:, 0].tolist()
        packed = pack(samples.select(indices), length, 0) if indices else []
        return [(kind, row) for row in packed[:count]]

    in_turn = chain.from_iterable(zip_longest(rows("greedy", greedy), rows("sampling", sampling)))
    mixed = [pair for pair in in_turn if pair is not None]
    return (mixed or rows("other", ~greedy & ~sampling))[:count]


class RowsModule(lightning.LightningDataModule):
    """Training and validation rows of a data folder.

    Args:
        stream: training rows. validation: held-out samples. block_size: K.
        exact: text was sampled without top-p and top-k.
    """

    def __init__(
        self,
        recipe: Recipe,
        stream: RowStream,
        validation: ShardSamples,
        block_size: int,
        exact: bool = True,
    ) -> None:
        super().__init__()
        self.recipe, self.stream, self.block_size = recipe, stream, block_size
        d, t = recipe.data, recipe.trainer
        self.held_out = validation_rows(validation, d.length, t.validation_rows, exact)
        self.start = 0  # optimizer steps before this run, from a checkpoint
        self._counts: dict[int, int] = {}

    def state_dict(self) -> dict[str, int]:
        """The position in the data: the number of steps."""
        assert self.trainer is not None
        return {"step": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["step"]

    def sampler(self, rank: int, world: int) -> StepSampler:
        """The batches of one process."""
        t = self.recipe.trainer
        share = t.batch_size // (t.accumulate * world)
        return StepSampler(t.max_steps, share, t.accumulate, rank, world, self.start)

    def train_dataloader(self) -> DataLoader[Place]:
        assert self.trainer is not None
        sampler = self.sampler(self.trainer.global_rank, self.trainer.world_size)

        def collate(places: Sequence[Place]) -> Step:
            return self.step(sampler, places)

        return DataLoader(_Places(len(sampler)), batch_sampler=sampler, collate_fn=collate)

    def step(self, sampler: StepSampler, places: Sequence[Place]) -> Step:
        """One micro-batch of one process."""
        keys = tuple(place for _, place in places)
        row_keys = tuple(map(self.stream.key, keys))
        rows = [self.stream.row(key) for key in row_keys]
        micro, width = places[0][0], 0
        if sampler.world > 1 and self.recipe.drafter.standalone:
            # as wide as in one process: the width determines the random draws of noise
            width = max(map(self._count, sampler.shared_places(micro)))
        batch, anchors = make_batch(
            rows, keys, self.recipe.trainer.anchors, self.block_size, self.recipe.seed, width
        )
        anchors_of_step = sum(map(self._count, sampler.step_places(micro)))
        scale = sampler.world * sampler.accumulate / max(anchors_of_step, 1)
        written = tuple(key < TEXT for key in row_keys)
        return Step(batch, anchors, scale, keys=row_keys, places=keys, written=written)

    def _count(self, place: int) -> int:
        """The anchors of the row at a place."""
        key = self.stream.key(place)
        if key not in self._counts:
            self._counts[key] = count_anchors(self.stream.row(key), self.recipe.trainer.anchors)
        return self._counts[key]

    def val_dataloader(self) -> DataLoader[Place]:
        """Held-out rows, one per batch, distributed to the processes in turn, with an anchor at
        every position, or for standalone drafters, whose blocks are more expensive, as many as in
        training.

        Every process gets equally many, since forwards may be collective: repeated rows have scale
        0.
        """
        assert self.trainer is not None
        rank, world, count = self.trainer.global_rank, self.trainer.world_size, len(self.held_out)
        batches = [[(0, place)] for place in range(rank, -(-count // world) * world, world)]

        def collate(places: Sequence[Place]) -> Step:
            place = places[0][1]
            index = place % count
            kind, row = self.held_out[index]
            d, t = self.recipe.data, self.recipe.trainer
            anchor_limit = min(d.length, t.anchors) if self.recipe.drafter.standalone else d.length
            batch, anchors = make_batch(
                [row], [index], anchor_limit, self.block_size, _VALIDATION_SEED
            )
            return Step(batch, anchors, float(place < count), kind, (-1 - index,), (index,))

        return DataLoader(_Places(count), batch_sampler=batches, collate_fn=collate)


class _Places(Dataset[Place]):
    """Places themselves: `collate` looks up the rows."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, place: Place) -> Place:
        return place

    def __len__(self) -> int:
        return self.count
