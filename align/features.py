"""`python -m align.features recipe=NAME …`: what training will read of the target, computed once and stored on disk.

The rows are those that `align.train` with the same words reads, in the same order: shared keys and values or taps, last hidden
states, and p's normaliser. `trainer.features_gb` limits what they take; rows beyond it are computed when they are trained on.
With `trainer.features_writer=vllm:URL` a server runs the target.
A run that was killed goes on where it was.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain

from align.common.claims import Claim
from align.common.errors import UserError, cli
from align.common.text import say
from align.config.launching import use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_training

LINE_EVERY = 30.0
"""Seconds between progress lines."""


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    recipe = parse_command(words, "align.features", __doc__ or "")
    if recipe is None:
        return
    if not recipe.trainer.features_gb:
        raise UserError("trainer.features_gb=0 stores nothing: give the GB of disk that it may take")
    check_training(recipe)
    use_deterministic_products()
    with Claim(recipe.features_folder, "trainer.features_path" if recipe.trainer.features_path else "output"):
        # only now: torch and transformers take seconds to import
        from align.config.hardware import target_device
        from align.data.packing import collate
        from align.data.supply import open_supply
        from align.outputs.cache import TargetOutputCache
        from align.outputs.row import row_key
        from align.outputs.served import Item, ServedStates, check_server
        from align.target.loading import load_target
        from align.training.build import conditioning
        from align.training.datamodule import distinct_places, validation_rows

        t, d = recipe.target, recipe.data
        target = load_target(t.name, device=target_device(recipe), **recipe.target_options)
        config, heat = conditioning(recipe, target), recipe.objective.temperature
        if recipe.trainer.features_server is not None:
            check_server(recipe, target, config)
        supply = open_supply(recipe, target)
        stream = supply.stream(recipe)
        cache = TargetOutputCache(target, config, recipe.trainer, recipe.features_folder)
        assert cache.store is not None
        places = recipe.trainer.max_steps * recipe.trainer.batch_size
        held_out = validation_rows(supply.validation, d.length, recipe.trainer.validation_rows, supply.exact)
        wanted = chain(
            ((0, row, 1.0) for _, row in held_out),
            ((place, stream.row(key), heat) for place, key in distinct_places(stream, places)),
        )
        rows: Iterator[Item] = (
            (place, collate([row]).to(target.device), heat) for place, row, heat in wanted
        )
        with ExitStack() as stack:
            stack.callback(cache.close)  # what is computed is stored, whatever ends this
            if recipe.trainer.features_server is not None:
                served = stack.enter_context(ServedStates(recipe, target, config))
                cache.run, store = served.features, cache.store
                rows = served.ahead(rows, lambda item: row_key(*item[1:]) in store)
            start = printed = time.monotonic()
            for place, row, temperature in rows:
                cache.row(row, temperature)
                if cache.store.full:
                    break
                if (now := time.monotonic()) - printed >= LINE_EVERY:
                    printed = now
                    left = (now - start) / (place + 1) * (places - place - 1) / 60
                    say(f"{len(cache.store)} rows, at most {left:.0f} min left")
    full = ", the limit of trainer.features_gb: the other rows are computed when they are trained on"
    say(
        f"{len(cache.store)} rows, {cache.store.bytes / 1e9:.3g} GB in {recipe.features_folder}"
        f"{full if cache.store.full else ''}"
    )


if __name__ == "__main__":
    main()
