"""Check that everything a run reads of its target is stored (`target.parallel=absent`)."""

from __future__ import annotations

from itertools import chain

from align.data.packing import collate
from align.outputs.row import row_key
from align.training.base_module import DrafterModule
from align.training.datamodule import RowsModule, distinct_places
from specalign.common.commands import command
from specalign.common.errors import UserError
from specalign.common.text import plural


def check_stored_rows(module: DrafterModule, rows: RowsModule) -> None:
    """Raises UserError if a row of the run is not on disk."""
    recipe = module.recipe
    assert (
        module.target_cache is not None and module.target_cache.store is not None
    )  # the recipe requires it
    store = module.target_cache.store
    places = distinct_places(rows.stream, module.schedule.rows_before(recipe.trainer.max_steps))
    temperature = recipe.objective.temperature
    held_out = ((row, 1.0) for _, row in rows.held_out)
    training = ((rows.stream.row(key), temperature) for _, key in places)
    missing = sum(row_key(collate([row]), at) not in store for row, at in chain(held_out, training))
    if not missing:
        return
    gigabytes = recipe.trainer.features_gb
    if len(store):  # the size of all rows, and a tenth more
        gigabytes = max(gigabytes, 1.1e-9 * store.bytes / len(store) * (len(store) + missing))
    arguments = [
        f"recipe={recipe.name}",
        f"output={recipe.output}",
        f"trainer.features_gb={gigabytes:.3g}",
    ]
    raise UserError(
        f"target.parallel=absent: {plural(missing, 'row')} of this run not in "
        f"{recipe.features_folder} "
        f"({command('align.features', *arguments)} with the run's other arguments, without "
        "target.parallel, stores them)"
    )
