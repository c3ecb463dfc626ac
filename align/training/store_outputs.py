"""Computing and storing the target's outputs for a training run."""

import time
from itertools import chain

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.packing import collate
from align.data.supply import open_supply
from align.outputs.cache import TargetOutputCache
from align.training.build import conditioning
from align.training.datamodule import validation_rows
from specalign.common.text import say
from specalign.lm.loading import load_target


def count_text_rows(recipe: Recipe) -> int:
    """Packed rows of `data.text`, which a run reads first."""
    t, d = recipe.trainer, recipe.data
    return round(d.text_share * t.max_steps) * t.batch_size if d.text else 0


def store_outputs(recipe: Recipe) -> None:
    """Store the outputs of all rows that the recipe reads, each once, held-out rows first, up to
    `trainer.features_gb`."""
    t = recipe.trainer
    target = load_target(recipe.target.name, device=target_device(recipe), **recipe.target_options)
    config = conditioning(recipe.drafter, target)
    supply = open_supply(recipe, target)
    cache = TargetOutputCache(target, config, t, recipe.features_folder)
    store = cache.store
    assert store is not None
    length, exact = recipe.data.length, supply.exact
    held_out = validation_rows(supply.validation, length, t.validation_rows, exact)
    stream = supply.stream(recipe, count_text_rows(recipe))
    keys = dict.fromkeys(map(stream.key, range(t.max_steps * t.batch_size)))
    validated = ((row, 1.0) for _, row in held_out)
    trained = ((stream.row(key), recipe.objective.temperature) for key in keys)
    printed = time.monotonic()
    for row, temperature in chain(validated, trained):
        cache.row(collate([row]).to(target.device), temperature)
        if store.full:
            break
        if time.monotonic() - printed >= 30:
            printed = time.monotonic()
            say(f"{store.count} rows")
    line = f"{store.count} rows, {store.bytes / 1e9:.3g} GB in {recipe.features_folder}"
    if store.full:
        line += ", the limit set by trainer.features_gb; training computes the other rows"
    say(line)
