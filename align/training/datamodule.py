"""Packed rows with anchors, as a function of (seed, step): resuming is starting at another step.
A step's global batch depends neither on the number of processes nor on that of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
HeldOutRows = list[tuple[str, PackedRow]]
"""Validation rows with their kind of text: greedy, sampling or other."""
_VALIDATION_SEED = 0x7A11D


@dataclass(frozen=True)
class StepSampler:
    """Batch sampler of places from step `start` on, one list per micro-batch. Step s takes the
    places s·G … s·G+G−1 of the stream, split into `accumulate` micro-batches, each split into
    `world` slices of `batch_size` rows, one per process. steps: optimizer steps in all."""

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


def make_batch(
    rows: Sequence[PackedRow],
    keys: Sequence[int],
    anchors: int,
    block_size: int,
    seed: int,
    width: int = 0,
) -> tuple[Batch, Anchors]:
    """Stack rows with `anchors` random anchors each, drawn from (seed, key). width: the least
    number of anchor columns; more are kept only if a row uses them."""
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


def validation_rows(samples: ShardSamples, length: int, count: int, exact: bool) -> HeldOutRows:
    """At most `count` held-out rows, kinds of text in turn, independent of the run's seed.

    `greedy` text, generated at temperature 0, estimates τ of greedy decoding; `sampling` text, at
    temperature 1 and, if `exact`, without top-p and top-k, that of sampling. Each estimate is
    unbiased only on its own text.
    """
    greedy = samples.temperature == 0
    sampling = (samples.temperature == 1) & exact

    def rows(kind: str, chosen: Tensor) -> HeldOutRows:
        indices = chosen.nonzero()[:, 0].tolist()
        packed = pack(samples.select(indices), length, 0) if indices else []
        return [(kind, row) for row in packed[:count]]

    in_turn = chain.from_iterable(zip_longest(rows("greedy", greedy), rows("sampling", sampling)))
    mixed = [pair for pair in in_turn if pair is not None]
    return (mixed or rows("other", ~greedy & ~sampling))[:count]


class RowsModule(lightning.LightningDataModule):
    """Training and validation rows: of `stream`, and of `validation`, held-out samples. block_size:
    K. exact: text was sampled without top-p and top-k."""

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

    def train_dataloader(self) -> DataLoader[Place]:
        t, trainer = self.recipe.trainer, self.trainer
        assert trainer is not None
        world = trainer.world_size
        share = t.batch_size // (t.accumulate * world)
        sampler = StepSampler(
            t.max_steps, share, t.accumulate, trainer.global_rank, world, self.start
        )
        return _make_loader(sampler, lambda places: self.step(sampler, places))

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
        """The number of anchors that `sample_anchors` finds in the row at a place: positions whose
        next token is an answer's in the same document."""
        key = self.stream.key(place)
        if key not in self._counts:
            row = self.stream.row(key)
            same = (row.document_L[1:] == row.document_L[:-1]) & row.answer_L[1:]
            places = same & (row.positions_L[:-1] > 0) & (row.document_L[:-1] >= 0)
            self._counts[key] = min(self.recipe.trainer.anchors, int(places.sum()))
        return self._counts[key]

    def val_dataloader(self) -> DataLoader[Place]:
        """Held-out rows, one per batch, distributed to the processes in turn. Every process gets
        equally many, since forwards may be collective: repeated rows have scale 0."""
        assert self.trainer is not None
        rank, world, count = self.trainer.global_rank, self.trainer.world_size, len(self.held_out)
        batches = [[(0, place)] for place in range(rank, -(-count // world) * world, world)]
        return _make_loader(batches, lambda places: self._validation_step(places[0][1]))

    def _validation_step(self, place: int) -> Step:
        """A held-out row with an anchor at every position. Standalone drafters, whose blocks are
        more expensive, get the number of anchors used in training."""
        count, limit = len(self.held_out), self.recipe.data.length
        index = place % count
        kind, row = self.held_out[index]
        if self.recipe.drafter.standalone:
            limit = min(limit, self.recipe.trainer.anchors)
        batch, anchors = make_batch([row], [index], limit, self.block_size, _VALIDATION_SEED)
        return Step(batch, anchors, float(place < count), kind, (-1 - index,), (index,))


class _Places(Dataset[Place]):
    """Places themselves: `collate` looks up the rows."""

    def __getitem__(self, place: Place) -> Place:
        return place


def _make_loader(
    batches: Iterable[list[Place]], collate: Callable[[list[Place]], Step]
) -> DataLoader[Place]:
    return DataLoader(_Places(), batch_sampler=batches, collate_fn=collate)
