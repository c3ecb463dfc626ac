"""Packed rows with anchors, as a function of (seed, step): resuming is starting at another step.
A step's global batch depends neither on the number of processes nor on that of micro-batches."""

import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from align.config.recipe import Recipe
from align.data.packing import TEXT, RowStream, collate, pack
from align.outputs.served import PrefetchedSteps, StateServer
from specalign.common.batch import Anchors, Batch, PackedRow, Step, UsedPlaces
from specalign.common.rng import keyed_generator
from specalign.diffusion.noise import clean_prefixes, sample_anchors
from specalign.rows.shards import ShardSamples

HeldOutRows = list[tuple[str, PackedRow]]
"""Validation rows with their kind of text: greedy, sampling or other."""
_VALIDATION_SEED = 0x7A11D


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


def draw_prefixes(
    recipe: Recipe, anchors: Anchors, length: int, places: Sequence[int]
) -> Tensor | None:
    """The number of clean tokens at each block's start while training, (B, A), drawn from each
    row's place in the stream; None = always 0."""
    decay = recipe.objective.prefix_decay
    if decay == 0:
        return None
    generators = [keyed_generator(recipe.seed, 5, place) for place in places]
    return clean_prefixes(anchors, decay, length, generators)


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
    K. exact: text was sampled without top-p and top-k. prepare: completes a training step. served:
    returns the target's states of the steps that need them."""

    def __init__(
        self,
        recipe: Recipe,
        stream: RowStream,
        validation: ShardSamples,
        block_size: int,
        exact: bool = True,
        prepare: Callable[[Step], Step] = lambda step: step,
        served: StateServer | None = None,
    ) -> None:
        super().__init__()
        self.prepare, self.served = prepare, served
        self.recipe, self.stream, self.block_size = recipe, stream, block_size
        d, t = recipe.data, recipe.trainer
        self.held_out = validation_rows(validation, d.length, t.validation_rows, exact)
        self.start = 0  # optimizer steps before this run
        self._counts: dict[int, int] = {}

    def train_dataloader(self) -> DataLoader[Step] | PrefetchedSteps:
        t, trainer = self.recipe.trainer, self.trainer
        assert trainer is not None
        rest = range(self.start * t.accumulate, t.max_steps * t.accumulate)
        device = trainer.strategy.root_device
        step = partial(
            self.step,
            rank=trainer.global_rank,
            world=trainer.world_size,
            fixed=device.type != "cpu" and not self.recipe.drafter.standalone,
        )
        options = _WORKER if device.type == "cuda" else {}
        steps = DataLoader(_Steps(step), sampler=_RestOfRun(rest), batch_size=None, **options)
        if self.served is None or self.recipe.stage != "calibrate":
            return steps
        return PrefetchedSteps(steps, self.served)

    def step(self, micro: int, rank: int = 0, world: int = 1, fixed: bool = False) -> Step:
        """One micro-batch of one process. fixed: with always as many anchors, and few numbers of
        used places. Step s takes the places s·G … s·G+G−1 of the stream, for
        G = `trainer.batch_size`, split into micro-batches, each split into slices, one per
        process."""
        t = self.recipe.trainer
        size = t.batch_size // t.accumulate
        share = size // world
        places = range(micro * size + rank * share, micro * size + (rank + 1) * share)
        row_keys = tuple(map(self.stream.key, places))
        rows = [self.stream.row(key) for key in row_keys]
        width = t.anchors if fixed else 0
        if world > 1 and self.recipe.drafter.standalone:
            # as wide as in one process: the width determines the random draws of noise
            width = max(map(self._count, range(micro * size, (micro + 1) * size)))
        batch, anchors = make_batch(
            rows, places, t.anchors, self.block_size, self.recipe.seed, width
        )
        first = micro // t.accumulate * t.batch_size
        anchors_of_step = sum(map(self._count, range(first, first + t.batch_size)))
        scale = world * t.accumulate / max(anchors_of_step, 1)
        written = torch.tensor([key < TEXT for key in row_keys])
        step = Step(
            batch,
            anchors,
            scale,
            keys=row_keys,
            places=tuple(places),
            written_B=None if written.all() else written,
            clean_BA=draw_prefixes(self.recipe, anchors, batch.tokens_BL.shape[1], places),
            digests=batch.digests() if t.keeps_outputs else (),
        )
        step.used = UsedPlaces.find(anchors, batch.tokens_BL.shape[1], fixed)
        return self.prepare(step)

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

    def val_dataloader(self) -> DataLoader[Step] | PrefetchedSteps:
        """Held-out rows, one per batch, distributed to the processes in turn. Every process gets
        equally many, since forwards may be collective: repeated rows have scale 0."""
        assert self.trainer is not None
        world, count = self.trainer.world_size, len(self.held_out)
        places = range(self.trainer.global_rank, -(-count // world) * world, world)
        steps = DataLoader(_Steps(self._validation_step), sampler=places, batch_size=None)
        return steps if self.served is None else PrefetchedSteps(steps, self.served)

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


def _ignore_signals(worker: int) -> None:
    """A signal to the whole group stops the run after its step, which the worker serves until
    then."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


_WORKER: dict[str, Any] = {
    "num_workers": 1,
    "pin_memory": True,
    "multiprocessing_context": "fork",  # rows come from this process's memory
    "worker_init_fn": _ignore_signals,
}
"""DataLoader's options on a GPU: a process prepares the next steps, a thread pins their memory."""


class _Steps(Dataset[Step]):
    def __init__(self, make_step: Callable[[int], Step]) -> None:
        self.make_step = make_step

    def __getitem__(self, index: int) -> Step:
        return self.make_step(index)


class _RestOfRun:
    """The remaining micro-batches, as a sampler of all: Lightning counts from 0 also after
    resuming."""

    def __init__(self, rest: range) -> None:
        self.rest = rest

    def __len__(self) -> int:
        return self.rest.stop

    def __iter__(self) -> Iterator[int]:
        return iter(self.rest)
