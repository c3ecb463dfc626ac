"""Computing and storing the target's outputs for a training run, and checking that they are
stored."""

from __future__ import annotations

import time
from collections.abc import Iterator

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.packing import collate
from align.data.stream import RowStream
from align.data.supply import open_supply
from align.outputs.cache import OutputStore, TargetOutputCache, row_key
from align.training.build import conditioning
from align.training.datamodule import HeldOutRows, validation_rows
from specalign.common.batch import Batch
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.text import plural, say
from specalign.lm.loading import load_target


def count_text_rows(recipe: Recipe) -> int:
    """Packed rows of `data.text`, which a run reads first."""
    t, d = recipe.trainer, recipe.data
    return round(d.text_share * t.max_steps) * t.batch_size if d.text else 0


def list_rows(
    recipe: Recipe, held_out: HeldOutRows, stream: RowStream
) -> Iterator[tuple[Batch, float]]:
    """The rows that a run reads, held-out rows first, each once, as a batch of one with the
    temperature of p."""
    for _, row in held_out:
        yield collate([row]), 1.0
    places = range(recipe.trainer.max_steps * recipe.trainer.batch_size)
    for key in dict.fromkeys(map(stream.key, places)):
        yield collate([stream.row(key)]), recipe.objective.temperature


def store_outputs(recipe: Recipe) -> None:
    """Store the outputs of all rows that the recipe reads, up to `trainer.features_gb`."""
    t = recipe.trainer
    target = load_target(recipe.target.name, device=target_device(recipe), **recipe.target_options)
    config = conditioning(recipe.drafter, target)
    supply = open_supply(recipe, target)
    cache = TargetOutputCache(target, config, t, recipe.features_folder)
    store = cache.store
    assert store is not None
    held_out = validation_rows(
        supply.validation, recipe.data.length, t.validation_rows, supply.exact
    )
    stream = supply.stream(recipe, count_text_rows(recipe))
    printed = time.monotonic()
    for row, temperature in list_rows(recipe, held_out, stream):
        cache.row(row.to(target.device), temperature)
        if store.full:
            break
        if time.monotonic() - printed >= 30:
            printed = time.monotonic()
            say(f"{store.count} rows")
    line = f"{store.count} rows, {store.bytes / 1e9:.3g} GB in {recipe.features_folder}"
    if store.full:
        line += ", the limit set by trainer.features_gb; training computes the other rows"
    say(line)


def check_stored(
    recipe: Recipe, store: OutputStore, held_out: HeldOutRows, stream: RowStream
) -> None:
    """Raises UserError if a row of a run with `target.parallel=absent` is not on disk."""
    rows = list_rows(recipe, held_out, stream)
    missing = sum(row_key(row, temperature) not in store for row, temperature in rows)
    if not missing:
        return
    gigabytes = recipe.trainer.features_gb
    if store.count:  # the size of all rows, and a tenth more
        gigabytes = max(gigabytes, 1.1e-9 * store.bytes / store.count * (store.count + missing))
    arguments = [f"recipe={recipe.name}", f"output={recipe.output}"]
    storing = command("align.features", *arguments, f"trainer.features_gb={gigabytes:.3g}")
    raise UserError(
        f"target.parallel=absent: {plural(missing, 'row')} of this run not in "
        f"{recipe.features_folder} ({storing} with the run's other arguments, without "
        "target.parallel, stores them)"
    )
