"""A short trial on this machine: a few samples are generated and a few steps trained with the run's
own code, in a temporary folder. The whole run's time is scaled from it by counts."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from statistics import median

from lightning.pytorch.callbacks import Callback

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.stream import RowStream
from align.data.supply import open_supply
from align.data.synthesis import Synthesis
from align.planning.memory import TextSize, read_text_size
from align.training.base_module import Interrupted, NonFiniteLoss
from align.training.build import MODULES, draft_vocab, make_drafter
from align.training.datamodule import RowsModule
from align.training.run import fit
from specalign.common.claims import scratch
from specalign.common.errors import UserError
from specalign.lm.loading import load_target
from specalign.lm.model import Target

SAMPLES = 32
"""Samples that a pilot writes at most; training needs four."""


@dataclass
class Pilot:
    """Measured seconds. sample: to write one sample. fresh, stored: a training step whose rows the
    target had to read, and one whose outputs were stored. text: what was learned about samples,
    None if none were written."""

    loading: float = 0.0
    preparing: float = 0.0
    sample: float = 0.0
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
    """Generate and train a little of a recipe. Raises UserError: what the run itself would end
    with. KeyboardInterrupt: a signal."""
    pilot = Pilot()
    with scratch("specalign-plan-") as folder:
        small = _shrink(recipe, folder)
        start = time.monotonic()
        target = load_target(small.target.name, device=target_device(small), **small.target_options)
        pilot.loading = time.monotonic() - start
        if text.written < text.samples:
            _write_samples(small, target, pilot)
            found = read_text_size(small)
            source = f"{found.written} samples written now"
            pilot.text = replace(found, samples=text.samples, written=text.written, source=source)
        if text.written:  # training reads what is there, and nothing is added to it
            small.data.path = str(recipe.data_folder)
            small.data.samples = max(2, text.written)
            small.data.batch_size = recipe.data.batch_size
        _train_steps(small, target, pilot)
    return pilot


def _shrink(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe on a few samples, without what only the whole run needs."""
    small = copy.deepcopy(recipe)
    data, trainer = small.data, small.trainer
    small.output = str(folder / "run")
    small.target.parallel = "replicate"
    data.path = str(folder / "data")
    data.samples = data.batch_size = min(SAMPLES, data.batch_size, max(2, data.samples))
    data.writer = "target"  # a server is not asked for a trial
    data.text = []
    if trainer.features_gb:
        trainer.keep_features_gb = max(trainer.keep_features_gb, 1.0)
    trainer.features_gb = 0.0
    trainer.logger = []
    trainer.validate_first = False
    trainer.max_minutes = None
    return small


def _write_samples(small: Recipe, target: Target, pilot: Pilot) -> None:
    """Write a batch and time it, then the further ones that training needs."""
    writing = Synthesis(small, target, small.data_folder, quiet=True)
    start = time.monotonic()
    writing.write_shard()
    pilot.sample = (time.monotonic() - start) / small.data.batch_size
    while writing.manifest["samples"] < 4:
        writing.write_shard()
    small.data.samples = writing.manifest["samples"]


def _train_steps(small: Recipe, target: Target, pilot: Pilot) -> None:
    """Train a few steps on new rows, then on rows that were read before."""
    start, trainer = time.monotonic(), small.trainer
    supply = open_supply(small, target, quiet=True)
    vocab = draft_vocab(small, target, supply, None)
    drafter = make_drafter(target, small.drafter, vocab, small.seed)
    new = 1 + max(2, ceil(6 / trainer.batch_size))
    again = 4 if trainer.keep_features_gb else 1
    trainer.max_steps = trainer.validate_every = trainer.checkpoint_every = new + again
    trainer.warmup_steps = min(trainer.warmup_steps, trainer.max_steps)
    trainer.validation_rows = min(2, trainer.validation_rows)
    stream = _Repeating(supply.stream(small, 0), new * trainer.batch_size)
    rows = RowsModule(small, stream, supply.validation, drafter.config.block_size, supply.exact)
    times = StepTimes()
    try:
        module = MODULES[small.drafter.kind](drafter, small)
        fit(module, rows, None, quiet=True, callback=times)
    except Interrupted:
        raise KeyboardInterrupt from None
    except NonFiniteLoss as error:
        raise UserError(f"in a trial of a few steps {error}") from None
    seconds = [after - before for before, after in pairwise(times.steps)]
    pilot.preparing = times.steps[0] - start
    pilot.fresh = median(seconds[1:new])  # the first step is slower
    pilot.stored = median(seconds[new:]) if trainer.keep_features_gb else pilot.fresh
    pilot.validation_row = (times.validated - times.steps[-1]) / max(1, len(rows.held_out))
    pilot.saving = times.ended - times.validated


class _Repeating:
    """A stream whose first rows come again."""

    def __init__(self, stream: RowStream, places: int) -> None:
        self.stream, self.places = stream, places
        self.row = stream.row

    def key(self, place: int) -> int:
        return self.stream.key(place % self.places)


class StepTimes(Callback):
    """When each step began, and the last one ended; when validation and saving ended."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.validated = self.ended = 0.0

    def on_train_batch_start(self, *of_step: object) -> None:
        self.steps.append(time.monotonic())

    def on_validation_start(self, *of_run: object) -> None:
        self.steps.append(time.monotonic())

    def on_validation_end(self, *of_run: object) -> None:
        self.validated = time.monotonic()

    def on_train_end(self, *of_run: object) -> None:
        self.ended = time.monotonic()


def scale_seconds(recipe: Recipe, text: TextSize, pilot: Pilot, importing: float) -> StageSeconds:
    """The whole run's seconds. `importing`: seconds until a process has imported what it needs."""
    trainer = recipe.trainer
    starting = importing + pilot.loading
    writing = 0.0
    if text.written < text.samples:
        writing = starting + (text.samples - text.written) / text.kept * pilot.sample
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
