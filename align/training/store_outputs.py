"""Computing and storing the target's outputs for a training run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.packing import collate
from align.data.supply import open_supply
from align.outputs.cache import TargetOutputCache
from align.outputs.row import row_key
from align.outputs.served import Item, ServedStates, check_server
from align.training.build import conditioning
from align.training.datamodule import distinct_places, validation_rows
from specalign.common.text import say
from specalign.lm.loading import load_target

LINE_EVERY = 30.0
"""Seconds between progress lines."""


def store_outputs(recipe: Recipe) -> None:
    """Store the outputs of all rows that the recipe reads, held-out rows first, up to
    `trainer.features_gb`."""
    t = recipe.trainer
    target = load_target(recipe.target.name, device=target_device(recipe), **recipe.target_options)
    config = conditioning(recipe, target)
    if t.features_server is not None:
        check_server(recipe, target, config)
    supply = open_supply(recipe, target)
    stream = supply.stream(recipe)
    cache = TargetOutputCache(target, config, t, recipe.features_folder)
    store = cache.store
    assert store is not None
    places = t.max_steps * t.batch_size
    held_out = validation_rows(
        supply.validation, recipe.data.length, t.validation_rows, supply.exact
    )
    temperature = recipe.objective.temperature
    wanted = chain(
        ((0, row, 1.0) for _, row in held_out),
        ((place, stream.row(key), temperature) for place, key in distinct_places(stream, places)),
    )
    rows: Iterator[Item] = (
        (place, collate([row]).to(target.device), at) for place, row, at in wanted
    )
    with ExitStack() as stack:
        stack.callback(cache.close)  # stores what is computed, however this ends
        if t.features_server is not None:
            served = stack.enter_context(ServedStates(recipe, target, config))
            cache.run = served.features
            rows = served.ahead(rows, lambda item: row_key(*item[1:]) in store)
        start = printed = time.monotonic()
        for place, row, at in rows:
            cache.row(row, at)
            if store.full:
                break
            now = time.monotonic()
            if now - printed >= LINE_EVERY:
                printed = now
                minutes = (now - start) / (place + 1) * (places - place - 1) / 60
                say(f"{len(store)} rows, at most {minutes:.0f} min left")
    limit = (
        ", the limit of trainer.features_gb: training computes the other rows" if store.full else ""
    )
    say(f"{len(store)} rows, {store.bytes / 1e9:.3g} GB in {recipe.features_folder}{limit}")
