"""A short trial on this machine: a few samples are generated and a few steps trained with the run's
own code, in a temporary folder. The whole run's time is scaled from it by counts."""

from __future__ import annotations

import copy
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from lightning.pytorch.callbacks import Callback

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.stream import Stream
from align.data.supply import open_supply
from align.data.synthesis import Synthesis
from align.planning.memory import TextSize, read_text_size
from align.training.base_module import Interrupted, NonFiniteLoss
from align.training.build import MODULES, draft_vocab, make_drafter
from align.training.datamodule import RowsModule
from align.training.run import fit
from specalign.common.batch import PackedRow
from specalign.common.claims import scratch
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target

SAMPLES = 16
"""Samples that a pilot writes at most."""
FEWEST = 4
"""Samples that training needs."""
PROBE_STEPS = 4
"""Steps of a batch as wide as the run's."""


@dataclass
class Pilot:
    """Measured seconds. batch: to write one batch. fresh, stored: a training step whose rows the
    target had to read, and one whose outputs were stored. text: what was learned about samples,
    None if none were written."""

    loading: float = 0.0
    preparing: float = 0.0
    batch: float = 0.0
    fresh: float = 0.0
    stored: float = 0.0
    validation_row: float = 0.0
    saving: float = 0.0
    text: TextSize | None = None


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage on this machine."""

    writing: float
    training: float


def run_pilot(recipe: Recipe, text: TextSize) -> Pilot:
    """Generate and train a little of a recipe.

    Raises:
        UserError: what the run itself would end with. KeyboardInterrupt: a signal.
    """
    pilot = Pilot()
    with scratch("specalign-plan-") as folder:
        small = _shrink(recipe, folder, text)
        start = time.monotonic()
        target = load_target(small.target.name, device=target_device(small), **small.target_options)
        pilot.loading = time.monotonic() - start
        if text.written < text.samples:
            _pilot_writing(recipe, small, target, pilot, folder, text)
        _pilot_training(small, target, pilot)
    return pilot


def _shrink(recipe: Recipe, folder: Path, text: TextSize) -> Recipe:
    """The recipe on a few samples, without what only the whole run needs."""
    small = copy.deepcopy(recipe)
    trainer = small.trainer
    small.output = str(folder / "run")
    small.target.parallel = "replicate"
    trainer.logger = []
    trainer.milestones = []
    trainer.resume = "never"
    trainer.validate_first = False
    trainer.max_minutes = None
    if trainer.features_gb:
        trainer.keep_features_gb = max(trainer.keep_features_gb, 1.0)
    trainer.features_gb = 0.0
    trainer.features_path = None
    small.data = small.data.without_text()
    small.data.follow = False
    small.data.writer = "target"  # a server is not asked for a trial
    small.data.path = str(recipe.data_folder if text.written else folder / "data")
    return small


def _pilot_writing(
    recipe: Recipe, small: Recipe, target: Target, pilot: Pilot, folder: Path, text: TextSize
) -> None:
    """Write a small batch to its end, and a few steps of one as wide as the run's, which says how
    much longer that takes."""
    width = recipe.data.batch_size
    few = min(SAMPLES, width, recipe.data.samples)
    writing, times = _write(small, target, folder / "data", few)
    pilot.batch = times[-1] - times[0]
    if width > few:
        _, wide = _write(small, target, folder / "wide", width, PROBE_STEPS)
        pilot.batch *= np.median(np.diff(wide)) / np.median(np.diff(times[: PROBE_STEPS + 1]))
    while writing.manifest["samples"] < FEWEST:
        writing.write_shard()
    samples = writing.manifest["samples"]
    if not text.written:
        small.data.samples, small.data.batch_size, small.data.write = samples, few, "never"
    own = copy.deepcopy(small)
    own.data.path = str(folder / "data")
    measured = read_text_size(own)
    source = f"{samples} samples written now"
    pilot.text = replace(measured, samples=text.samples, written=text.written, source=source)


class _Enough(Exception):
    """Enough steps have been timed."""


def _write(
    recipe: Recipe, target: Target, folder: Path, width: int, steps: int | None = None
) -> tuple[Synthesis, list[float]]:
    """Write one batch, or its first steps; returns the times at which each step ended."""
    own = copy.deepcopy(recipe)
    own.data.path, own.data.samples, own.data.batch_size = str(folder), width, width
    times = [time.monotonic()]

    def note_step(tokens: int, rows: int = 0) -> None:
        times.append(time.monotonic())
        if steps is not None and len(times) > steps:
            raise _Enough

    writing = Synthesis(own, target, folder, quiet=True)
    if steps is None:
        writing.write_shard(note_step)
    else:
        with suppress(_Enough):
            writing.batches.write(0, width, Counter(), note_step)
    return writing, times


def _pilot_training(small: Recipe, target: Target, pilot: Pilot) -> None:
    """Train a few steps on new rows, then on rows that were read before."""
    start, trainer = time.monotonic(), small.trainer
    supply = open_supply(small, target, quiet=True)
    vocab = draft_vocab(small, target, supply, None)
    drafter = make_drafter(target, small.drafter, vocab, small.seed)
    new = max(2, ceil(6 / trainer.batch_size))
    again = 4 if trainer.keep_features_gb else 1
    trainer.max_steps = trainer.validate_every = trainer.checkpoint_every = 1 + new + again
    trainer.warmup_steps = min(trainer.warmup_steps, trainer.max_steps)
    trainer.validation_rows = min(2, trainer.validation_rows)
    stream = _Repeating(supply.stream(small), new * trainer.batch_size)
    rows = RowsModule(small, stream, supply.validation, drafter.config.block_size, supply.exact)
    times = StepTimes()
    try:
        module = MODULES[small.drafter.kind](drafter, small)
        fit(small, module, rows, None, quiet=True, callback=times)
    except Interrupted:
        raise KeyboardInterrupt from None
    except NonFiniteLoss as error:
        raise UserError(f"in a trial of a few steps {error}") from None
    pilot.preparing = times.started - start
    fresh = [seconds for seconds, count in times.steps if count]
    stored = [seconds for seconds, count in times.steps if not count]
    pilot.fresh = float(np.median(fresh or stored))
    pilot.stored = float(np.median(stored)) if stored and trainer.keep_features_gb else pilot.fresh
    pilot.validation_row = times.validation / max(1, len(rows.held_out))
    pilot.saving = times.saving


class _Repeating:
    """A stream whose first rows come again."""

    def __init__(self, stream: Stream, places: int) -> None:
        self.stream, self.places = stream, places

    def key(self, place: int) -> int:
        return self.stream.key(place % self.places)

    def row(self, key: int) -> PackedRow:
        return self.stream.row(key)


class StepTimes(Callback):
    """Seconds of each step but the first, with the number of rows new to the target; of the last
    validation, and of saving."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.validation = self.saving = 0.0
        self.started = self.ended = 0.0
        self._seen: set[int] = set()
        self._fresh = 0
        self._since = self._validated = 0.0

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if batch_idx > 1:
            self.steps.append((now - self._since, self._fresh))
        self.started = self.started or now
        self._since = now
        self._fresh = len({*batch.keys} - self._seen)
        self._seen |= {*batch.keys}

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._validated = time.monotonic()
        self.steps.append((self._validated - self._since, self._fresh))

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.ended = time.monotonic()
        self.validation = self.ended - self._validated

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.saving = time.monotonic() - self.ended


def scale_seconds(recipe: Recipe, text: TextSize, pilot: Pilot, importing: float) -> StageSeconds:
    """The whole run's seconds. `importing`: seconds until a process has imported what it needs."""
    trainer = recipe.trainer
    starting = importing + pilot.loading
    writing = 0.0
    if text.written < text.samples:
        samples = (text.samples - text.written) / text.kept
        writing = starting + ceil(samples / recipe.data.batch_size) * pilot.batch
    steps = fresh = trainer.max_steps
    if trainer.keep_features_gb or trainer.features_gb:
        fresh = min(steps, ceil(text.rows(recipe.data.length) / trainer.batch_size))
    validations = ceil(steps / trainer.validate_every) + trainer.validate_first
    training = (
        fresh * pilot.fresh
        + (steps - fresh) * pilot.stored
        + validations * trainer.validation_rows * pilot.validation_row
        + ceil(steps / trainer.checkpoint_every) * pilot.saving
    )
    if trainer.max_minutes is not None:
        training = min(training, 60 * trainer.max_minutes)
    return StageSeconds(writing, starting + pilot.preparing + training)
