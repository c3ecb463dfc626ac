"""A short trial on this machine: a few samples written, a few steps trained, with the code that the run itself uses, in a folder
that is removed afterwards. Its times are those of the whole run, scaled by counts."""

from __future__ import annotations

import copy
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import numpy as np

from align.common.batch import PackedRow
from align.common.claims import scratch
from align.common.errors import UserError
from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.stream import Stream
from align.data.supply import Supply, open_supply
from align.data.synthesis import Synthesis
from align.planning.compute import Seconds, rows_trained
from align.planning.text import TextSize
from align.target.loading import load_target
from align.target.model import Target
from align.training.base_module import Interrupted, NonFiniteLoss
from align.training.build import KINDS, draft_vocab
from align.training.callbacks import StepTimes
from align.training.datamodule import RowsModule
from align.training.run import fit

ROWS = 16
"""Samples that a trial writes: their rows are few, so that a trial that goes on trains on rows which it has kept, too."""
FEWEST = 4
"""Samples that training needs at least."""
KEPT_STEPS = 4
"""Steps over rows that were read before."""
PROBE_STEPS = 4
"""Steps of writing at a width that only shows what it costs."""


@dataclass
class Pilot:
    """What was measured, in seconds. `alive`: share of the rows that still write, step by step. `costs`: rows → seconds of a writing
    step at the beginning; `slope`: what a row and a token of context add. fresh, known: a training step whose rows the target
    had to read, and one whose outputs were kept."""

    loading: float = 0.0
    preparing: float = 0.0
    alive: list[float] = field(default_factory=list)
    costs: dict[int, float] = field(default_factory=dict)
    slope: float = 0.0
    fresh: float = 0.0
    known: float = 0.0
    validation_row: float = 0.0
    saving: float = 0.0
    text: TextSize | None = None


def pilot(recipe: Recipe, text: TextSize) -> Pilot:
    """Write and train a little of a recipe.

    Raises:
        UserError: what the run itself would end with. KeyboardInterrupt: a signal.
    """
    found = Pilot()
    with scratch("specalign-plan-") as place:
        own = _small(recipe, place, text)
        start = time.monotonic()
        target = load_target(own.target.name, device=target_device(own), **own.target_options)
        found.loading = time.monotonic() - start
        if text.there < text.samples:
            found.text = _write(own, target, found, place, recipe.data.batch_size, text)
        _train(own, target, found)
    return found


def _small(recipe: Recipe, folder: Path, text: TextSize) -> Recipe:
    """The same, small: where data are there they are read, else as few are written as make some rows."""
    own = copy.deepcopy(recipe)
    d, t = own.data, own.trainer
    own.output, t.logger, t.resume, t.milestones = str(folder / "run"), [], "never", []
    d.path = str(recipe.data_folder) if text.there else str(folder / "data")
    d.text, d.follow = [], False
    d.writer = "target"  # a server is not asked for a trial
    t.features_path, t.validate_first, t.show_samples = None, False, 0
    t.keep_features_gb = max(t.keep_features_gb, 1.0 if t.features_gb else 0.0)
    t.features_gb, t.max_minutes = 0.0, None
    if not text.there:
        d.samples = d.batch_size = min(ROWS, d.batch_size, d.samples)
    return own


def _write(own: Recipe, target: Target, found: Pilot, folder: Path, width: int, text: TextSize) -> TextSize:
    """Write the samples, and a few steps of a batch as wide as the run's."""
    steps: list[tuple[float, int]] = []

    def note(tokens: int, rows: int = 0) -> None:  # a token of each row that is not at its end
        steps.append((time.monotonic(), tokens))

    few = copy.deepcopy(own)
    if text.there:
        few.data.path = str(folder / "written")
        few.data.samples = few.data.batch_size = min(ROWS, own.data.batch_size)
    few.data.samples = few.data.batch_size  # all that a batch gives
    writing = Synthesis(few, target, few.data_folder, quiet=True)
    writing.write_shard(note)
    seconds = [b[0] - a[0] for a, b in zip(steps, steps[1:], strict=False)]
    alive = [count for _, count in steps][: len(seconds)]
    found.alive = [1.0, *(count / few.data.batch_size for count in alive)]
    found.slope = _slope(seconds, alive)
    for rows in {max(1, width // 4), max(1, width // 2), width} - {few.data.batch_size}:
        found.costs[rows] = _probe(own, target, folder / f"probe-{rows}", rows)
    early = [s for s, count in zip(seconds[1:9], alive[1:9], strict=False) if count]
    found.costs[few.data.batch_size] = float(np.median(early)) if early else 0.0
    late = [(s, n) for s, n in zip(seconds, alive, strict=True) if 0 < n <= few.data.batch_size // 4]
    if late:
        rows, step = (
            max(1, round(float(np.median([n for _, n in late])))),
            float(np.median([s for s, _ in late])),
        )
        found.costs.setdefault(rows, max(0.0, step - found.slope * rows * len(seconds) / 2))
    while writing.manifest["samples"] < FEWEST:
        writing.write_shard()
    m = writing.manifest
    if not text.there:
        own.data.samples, own.data.write = m["samples"], "never"
    kept = m["samples"] / (m["samples"] + sum(m["dropped"].values()))
    tokens, answers = m["tokens"] / m["samples"], m["answer_tokens"] / m["tokens"]
    return TextSize(text.samples, text.there, tokens, answers, kept, f"{m['samples']} samples written now")


def _slope(seconds: list[float], alive: list[int]) -> float:
    """Seconds that one row and one token of context add to a step, by least squares; at least 0."""
    rows = np.array([[1.0, n, n * at] for at, n in enumerate(alive)])
    if len(rows) < 8:
        return 0.0
    solution, *_ = np.linalg.lstsq(rows, np.array(seconds), rcond=None)
    return max(0.0, float(solution[2]))


class _Enough(Exception):
    """A probe has seen what it wanted to."""


def _probe(own: Recipe, target: Target, folder: Path, rows: int) -> float:
    """Seconds of an early step with so many rows."""
    wide, times = copy.deepcopy(own), list[float]()
    wide.data.path, wide.data.samples, wide.data.batch_size = str(folder), rows, rows

    def note(tokens: int, rows: int = 0) -> None:
        times.append(time.monotonic())
        if len(times) > PROBE_STEPS:
            raise _Enough

    writing = Synthesis(wide, target, folder, quiet=True)
    with suppress(_Enough):
        writing.batches.write(0, rows, Counter(), note)
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _train(own: Recipe, target: Target, found: Pilot) -> None:
    """Some steps over rows that are new, then over rows that were kept."""
    start, t = time.monotonic(), own.trainer
    kind = KINDS[own.drafter.kind]
    supply: Supply = open_supply(own, target, quiet=True)
    drafter = kind.make(target, own, draft_vocab(own, target, supply, None))
    stream = supply.stream(own)
    few = min(6, len(getattr(stream, "rows", range(6))))
    new = max(2, ceil(few / t.batch_size))
    again = KEPT_STEPS if t.keep_features_gb else 1
    t.max_steps = t.validate_every = t.checkpoint_every = 1 + new + again
    t.warmup_steps, t.validation_rows = min(t.warmup_steps, t.max_steps), min(2, t.validation_rows)
    rows = RowsModule(
        own, _Again(stream, new * t.batch_size), supply.validation, drafter.config.block_size, supply.exact
    )
    module, times = kind.module(drafter, own), StepTimes()
    try:
        fit(own, module, rows, None, quiet=True, on_the_way=times)
    except Interrupted:
        raise KeyboardInterrupt from None
    except NonFiniteLoss as error:
        raise UserError(f"in a trial of a few steps {str(error).partition(';')[0]}") from None
    found.preparing = times.started - start
    fresh = [s for s, count in times.steps if count]
    known = [s for s, count in times.steps if not count]
    found.fresh = float(np.median(fresh or known))
    found.known = float(np.median(known)) if known and t.keep_features_gb else found.fresh
    found.validation_row = times.validation / max(1, len(rows.held_out))
    found.saving = times.saving


class _Again:
    """A stream whose first places come again after so many."""

    def __init__(self, stream: Stream, places: int) -> None:
        self.stream, self.places = stream, places

    def key(self, place: int) -> int:
        return self.stream.key(place % self.places)

    def row(self, key: int) -> PackedRow:
        return self.stream.row(key)


SHRINK = 0.8
"""Rows that have ended leave a batch as soon as a fifth of them have (`align.data.generation`)."""


def step_seconds(found: Pilot, rows: float, context: float) -> float:
    """Seconds of one writing step."""
    widths = sorted(found.costs)
    base = float(np.interp(rows, widths, [found.costs[w] for w in widths]))
    return base + found.slope * rows * context


def batch_seconds(found: Pilot, width: int) -> float:
    """Of one batch: its rows end as the trial's did."""
    total, inside = 0.0, float(width)
    for at, share in enumerate(found.alive):
        if share * width <= SHRINK * inside:
            inside = share * width
        if share <= 0:
            break
        total += step_seconds(found, max(1.0, inside), at)
    return total


def piloted_seconds(recipe: Recipe, text: TextSize, found: Pilot, starting: float) -> Seconds:
    """The whole run's. `starting`: seconds until a process has imported what it needs."""
    d, t = recipe.data, recipe.trainer
    writing = 0.0
    if text.there < text.samples:
        batches = ceil((text.samples - text.there) / max(text.kept, 1e-9) / d.batch_size)
        writing = starting + found.loading + batches * batch_seconds(found, d.batch_size)
    every, fresh = rows_trained(recipe, text)
    new = min(t.max_steps, ceil(fresh / t.batch_size))
    steps = new * found.fresh + (t.max_steps - new) * found.known
    validations = (
        t.max_steps // t.validate_every + int(t.validate_first) + int(t.max_steps % t.validate_every > 0)
    )
    saves = ceil(t.max_steps / t.checkpoint_every)
    more = validations * t.validation_rows * found.validation_row + saves * found.saving
    training = starting + found.loading + found.preparing + steps + more
    target = max(0.0, found.fresh - found.known)
    features = starting + found.loading + min(every, text.rows(d.length)) / t.batch_size * target
    if t.max_minutes is not None:
        training = min(training, starting + found.loading + found.preparing + 60 * t.max_minutes)
    return Seconds(writing, training, features, "measured here on a few samples and steps")
