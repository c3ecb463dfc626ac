"""Packed rows with anchors, as a function of (seed, step): resuming is starting at another step.

A step's global batch does not depend on how many processes share it, so two processes train on what one would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import lightning
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from align import data
from align.corruption import Anchors, sample_anchors
from align.data import Batch, PackedRow
from align.recipe import Recipe


@dataclass
class Step:
    """What one process sees in one micro-batch."""

    batch: Batch
    anchors: Anchors

    def to(self, device: torch.device) -> Step:
        anchors = Anchors(self.anchors.index_BA.to(device), self.anchors.valid_BAK.to(device))
        return Step(self.batch.to(device), anchors)


Place = tuple[int, int]  # (key of the random anchors, row)


class StepSampler(Sampler[list[Place]]):
    """Batches of (place in the endless shuffled stream, row) from micro-batch `start` on; one list each.

    The stream is one seeded permutation of the rows after another; micro-batch m takes its places m·G … m·G+G−1, G
    rows over all processes, and each process its own slice of them.
    """

    def __init__(
        self,
        rows: int,
        batches: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
    ) -> None:
        self.rows, self.batches, self.batch_size, self.seed = rows, batches, batch_size, seed
        self.rank, self.world, self.start = rank, world, start
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self.batches

    def row(self, place: int) -> int:
        """The row at a place of the stream."""
        epoch, index = divmod(place, self.rows)
        if epoch not in self._orders:
            self._orders = {epoch: np.random.default_rng([self.seed, 1, epoch]).permutation(self.rows)}
        return int(self._orders[epoch][index])

    def __iter__(self) -> Iterator[list[Place]]:
        share = self.batch_size
        for m in range(self.start, self.batches):
            first = m * share * self.world + self.rank * share
            yield [(place, self.row(place)) for place in range(first, first + share)]


class Rows(Dataset[tuple[PackedRow, int]]):
    """Rows by place: the row and the seed of its anchors."""

    def __init__(self, rows: Sequence[PackedRow]) -> None:
        self.rows = rows

    def __getitem__(self, place: Place) -> tuple[PackedRow, int]:
        return self.rows[place[1]], place[0]

    def __len__(self) -> int:
        return len(self.rows)


def make_step(rows: Sequence[tuple[PackedRow, int]], anchors: int, block_size: int, seed: int) -> Step:
    """Stack rows, each with anchors drawn from (seed, its place)."""
    parts = []
    for row, place in rows:
        generator = torch.Generator().manual_seed(
            int(np.random.default_rng([seed, 2, place]).integers(2**62))
        )
        parts.append(sample_anchors(data.collate([row]), anchors, block_size, generator))
    index, valid = torch.cat([p.index_BA for p in parts]), torch.cat([p.valid_BAK for p in parts])
    used = int(valid[..., 0].sum(1).max())  # anchors that no row of this batch has would only cost time
    keep = valid[..., 0].long().argsort(dim=1, descending=True, stable=True)[:, : max(used, 1)]
    index = index.gather(1, keep)
    valid = valid.gather(1, keep[..., None].expand(-1, -1, valid.shape[2]))
    return Step(data.collate([r for r, _ in rows]), Anchors(index, valid))


class RowsModule(lightning.LightningDataModule):
    """Training and validation rows of a data folder.

    Args:
        recipe: data, trainer and seed are read.
        training, validation: samples of each side.
        block_size: K.
    """

    def __init__(
        self, recipe: Recipe, training: data.Samples, validation: data.Samples, block_size: int
    ) -> None:
        super().__init__()
        self.recipe, self.block_size = recipe, block_size
        self.rows = data.pack(training, recipe.data.length, recipe.seed)
        self.validation_rows = data.pack(validation, recipe.data.length, recipe.seed)[
            : recipe.trainer.validation_rows
        ]
        self.consumed = 0  # micro-batches behind us, set from a checkpoint

    def state_dict(self) -> dict[str, int]:
        """The data position: it follows from the step, and is kept to be checked against it."""
        t = self.recipe.trainer
        assert self.trainer is not None
        return {"consumed": self.trainer.global_step * t.accumulate, "rows": len(self.rows)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.consumed = state["consumed"]

    def train_dataloader(self) -> DataLoader[tuple[PackedRow, int]]:
        t, trainer = self.recipe.trainer, self.trainer
        assert trainer is not None
        share = t.batch_size // (t.accumulate * trainer.world_size)
        sampler = StepSampler(
            len(self.rows),
            t.max_steps * t.accumulate,
            share,
            self.recipe.seed,
            trainer.global_rank,
            trainer.world_size,
            self.consumed,
        )
        return DataLoader(Rows(self.rows), batch_sampler=sampler, collate_fn=self._collate)

    def _collate(self, rows: Sequence[tuple[PackedRow, int]]) -> Step:
        return make_step(rows, self.recipe.trainer.anchors, self.block_size, self.recipe.seed)

    def val_dataloader(self) -> DataLoader[tuple[PackedRow, int]]:
        def fixed(rows: Sequence[tuple[PackedRow, int]]) -> Step:
            return make_step(rows, self.recipe.data.length, self.block_size, -1 % 2**31)

        places = [[(i, i)] for i in range(len(self.validation_rows))]
        return DataLoader(Rows(self.validation_rows), batch_sampler=_Fixed(places), collate_fn=fixed)


class _Fixed(Sampler[list[Place]]):
    """Given batches, in order."""

    batch_size = 1

    def __init__(self, batches: list[list[Place]]) -> None:
        self.list = batches

    def __len__(self) -> int:
        return len(self.list)

    def __iter__(self) -> Iterator[list[Place]]:
        return iter(self.list)
