"""Packed rows with anchors, as a function of (seed, step): resuming is starting at another step.

A step's global batch depends neither on how many processes share it nor on how many micro-batches it is cut into, so
two processes train on what one would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest

import lightning
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

from align.common.batch import Anchors, Batch, PackedRow, Step
from align.common.rng import keyed_generator
from align.config.recipe import Recipe
from align.data.packing import collate, pack
from align.data.shards import Texts
from align.data.stream import TEXT, Stream
from align.diffusion.noise import sample_anchors

Place = tuple[int, int, int]  # (micro-batch, place in the stream = key of the anchors, row)
_VALIDATION_SEED = 0x7A11D


class StepSampler(Sampler[list[Place]]):
    """The places of every micro-batch from `start` on; one list each.

    Step s takes the places s·G … s·G+G−1 of the stream, moved by `offset`; they are cut into `accumulate` micro-batches, and each
    of these into `world` slices, one for each process.

    Args:
        stream: which row stands at a place. steps: optimizer steps in all. batch_size: rows of one slice. offset: of a run that
            resumed with another batch size, so that it continues where it stopped.
    """

    def __init__(
        self,
        stream: Stream,
        steps: int,
        batch_size: int,
        *,
        accumulate: int = 1,
        rank: int = 0,
        world: int = 1,
        start: int = 0,
        offset: int = 0,
    ) -> None:
        self.stream, self.batch_size, self.offset = stream, batch_size, offset
        self.accumulate, self.rank, self.world = accumulate, rank, world
        self.start, self.stop = start * accumulate, steps * accumulate

    def __len__(self) -> int:
        """All micro-batches of the run, those before `start` too: Lightning counts a resumed run's from 0."""
        return self.stop

    def places(self, micro: int) -> range:
        """This process's places of one micro-batch."""
        first = (micro * self.world + self.rank) * self.batch_size + self.offset
        return range(first, first + self.batch_size)

    def shared_places(self, micro: int) -> range:
        """All processes' places of one micro-batch."""
        size = self.world * self.batch_size
        return range(micro * size + self.offset, (micro + 1) * size + self.offset)

    def step_places(self, micro: int) -> range:
        """The places of the whole step that a micro-batch belongs to, over all processes."""
        size = self.accumulate * self.world * self.batch_size
        first = micro // self.accumulate * size + self.offset
        return range(first, first + size)

    def __iter__(self) -> Iterator[list[Place]]:
        for micro in range(self.start, self.stop):
            yield [(micro, place, self.stream.key(place)) for place in self.places(micro)]


def anchor_count(row: PackedRow, anchors: int, per_document: bool = False) -> int:
    """How many anchors `sample_anchors` finds in a row: places whose next token is answer of the same document."""
    same = (row.document_L[1:] == row.document_L[:-1]) & row.answer_L[1:]
    places = same & (row.positions_L[:-1] > 0) & (row.document_L[:-1] >= 0)
    if per_document:
        counts = row.document_L[:-1][places].unique(return_counts=True)[1]
        return int(counts.clamp_max(anchors).sum())
    return min(anchors, int(places.sum()))


def make_batch(
    rows: Sequence[PackedRow],
    keys: Sequence[int],
    anchors: int,
    block_size: int,
    seed: int,
    per_document: bool = False,
    width: int = 0,
) -> tuple[Batch, Anchors]:
    """Stack rows, each with anchors of its own, `anchors` of them or so many in each document, drawn from (seed, its key); anchors
    that no row has are left out, beyond `width` of them."""
    parts = []
    for row, key in zip(rows, keys, strict=True):
        generator = keyed_generator(seed, 2, key)
        parts.append(sample_anchors(collate([row]), anchors, block_size, generator, per_document))
    if per_document:
        widest = max(width, *(p.index_BA.shape[1] for p in parts))
        parts = [_widened(part, widest) for part in parts]
    index, valid = torch.cat([p.index_BA for p in parts]), torch.cat([p.valid_BAK for p in parts])
    used = max(int(valid[..., 0].sum(1).max()), 1, width)
    keep = valid[..., 0].long().argsort(dim=1, descending=True, stable=True)[:, :used]
    index, valid = index.gather(1, keep), valid.gather(1, keep[..., None].expand(-1, -1, block_size))
    return collate(rows), Anchors(index, valid)


def _widened(anchors: Anchors, width: int) -> Anchors:
    """With anchors that have no valid position, up to `width` of them."""
    more = width - anchors.index_BA.shape[1]
    return Anchors(F.pad(anchors.index_BA, (0, more)), F.pad(anchors.valid_BAK, (0, 0, 0, more)))


def distinct_places(stream: Stream, places: int) -> Iterator[tuple[int, int]]:
    """Of so many places of a stream those whose row stands at none before, with its key."""
    seen: set[int] = set()
    for place in range(places):
        key = stream.key(place)
        if key not in seen:
            seen.add(key)
            yield place, key


def validation_rows(samples: Texts, length: int, count: int, exact: bool) -> list[tuple[str, PackedRow]]:
    """At most `count` held-out rows, each of one kind of text, the kinds in turn. The same ones whatever the run's seed.

    `greedy` text was written at temperature 0 and tells τ of greedy decoding, `sampling` text at temperature 1 and,
    where `exact`, without top-p and top-k tells τ of sampling; each estimate is unbiased on its own text alone.
    """
    heat = samples.temperature
    sampling = (heat == 1) & exact
    kinds = {"greedy": heat == 0, "sampling": sampling, "other": (heat != 0) & ~sampling}

    def rows(kind: str, chosen: Tensor) -> list[tuple[str, PackedRow]]:
        indices = chosen.nonzero()[:, 0].tolist()
        packed = pack(samples.select(indices), length, 0) if indices else []
        return [(kind, row) for row in packed[:count]]

    for_tau = [rows(kind, chosen) for kind, chosen in kinds.items() if kind != "other"]
    mixed = [pair for pair in chain.from_iterable(zip_longest(*for_tau)) if pair is not None]
    return (mixed or rows("other", kinds["other"]))[:count]


class RowsModule(lightning.LightningDataModule):
    """Training and validation rows of a data folder.

    Args:
        recipe: data, trainer and seed are read.
        stream: the rows that are trained on.
        validation: samples that are held out.
        block_size: K.
        exact: the data's text was drawn without top-p and top-k.
        offset: see `StepSampler`.
    """

    def __init__(
        self,
        recipe: Recipe,
        stream: Stream,
        validation: Texts,
        block_size: int,
        exact: bool = True,
        offset: int = 0,
    ) -> None:
        super().__init__()
        self.recipe, self.stream, self.block_size = recipe, stream, block_size
        d, t = recipe.data, recipe.trainer
        self.held_out = validation_rows(validation, d.length, t.validation_rows, exact)
        self.start = 0  # optimizer steps behind us, set from a checkpoint
        self.offset = offset
        self._counts: dict[int, int] = {}

    def state_dict(self) -> dict[str, int]:
        """The data position: the number of steps taken says it all."""
        assert self.trainer is not None
        return {"step": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["step"]

    def sampler(self, rank: int, world: int) -> StepSampler:
        """The batches of one process."""
        t = self.recipe.trainer
        share = t.batch_size // (t.accumulate * world)
        return StepSampler(
            self.stream,
            t.max_steps,
            share,
            accumulate=t.accumulate,
            rank=rank,
            world=world,
            start=self.start,
            offset=self.offset,
        )

    def train_dataloader(self) -> DataLoader[Place]:
        assert self.trainer is not None
        sampler = self.sampler(self.trainer.global_rank, self.trainer.world_size)

        def collate(places: Sequence[Place]) -> Step:
            return self.step(sampler, places)

        return DataLoader(_Places(len(sampler)), batch_sampler=sampler, collate_fn=collate)

    def step(self, sampler: StepSampler, places: Sequence[Place]) -> Step:
        """One micro-batch of one process."""
        found = tuple(key for _, _, key in places)
        rows = [self.stream.row(key) for key in found]
        keys = [place for _, place, _ in places]
        t, width = self.recipe.trainer, 0
        if sampler.world > 1 and self.recipe.drafter.standalone:
            # as wide as in one process, which decides how much noise is drawn
            together = sampler.shared_places(places[0][0])
            width = max(self._count(self.stream.key(place)) for place in together)
        batch, anchors = make_batch(
            rows, keys, t.anchors, self.block_size, self.recipe.seed, t.anchors_per == "document", width
        )
        everywhere = sum(self._count(self.stream.key(place)) for place in sampler.step_places(places[0][0]))
        scale = sampler.world * sampler.accumulate / max(everywhere, 1)
        written = tuple(key < TEXT for key in found)
        return Step(batch, anchors, scale, keys=found, places=tuple(keys), written=written)

    def _count(self, key: int) -> int:
        if key not in self._counts:
            t = self.recipe.trainer
            self._counts[key] = anchor_count(self.stream.row(key), t.anchors, t.anchors_per == "document")
        return self._counts[key]

    def val_dataloader(self) -> DataLoader[Place]:
        """Held-out rows, one a batch, dealt out to the processes in turn: with an anchor at every place, or for standalone
        drafters, whose blocks have heads of their own to compute, with as many as in training.

        Every process gets as many (forwards may be collective): what is there to fill up has scale 0.
        """
        assert self.trainer is not None
        rank, world, count = self.trainer.global_rank, self.trainer.world_size, len(self.held_out)
        dealt = [[(0, i, i % count)] for i in range(rank, -(-count // world) * world, world)]

        def fixed(places: Sequence[Place]) -> Step:
            _, place, index = places[0]
            kind, row = self.held_out[index]
            d, t = self.recipe.data, self.recipe.trainer
            most = min(d.length, t.anchors) if self.recipe.drafter.standalone else d.length
            batch, anchors = make_batch([row], [index], most, self.block_size, _VALIDATION_SEED)
            return Step(batch, anchors, 1.0 if place < count else 0.0, kind, (-1 - index,), (index,))

        return DataLoader(_Places(count), batch_sampler=_Fixed(dealt), collate_fn=fixed)


class _Places(Dataset[Place]):
    """Places as they are: rows are looked up where they are put together."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __getitem__(self, place: Place) -> Place:
        return place

    def __len__(self) -> int:
        return self.count


class _Fixed(Sampler[list[Place]]):
    """Given batches, in order."""

    batch_size = 1

    def __init__(self, batches: list[list[Place]]) -> None:
        self.list = batches

    def __len__(self) -> int:
        return len(self.list)

    def __iter__(self) -> Iterator[list[Place]]:
        return iter(self.list)
