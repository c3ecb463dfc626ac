"""`python -m align.train recipe=NAME …`: train a drafter on text that the target generates.

Missing text is generated first (data.write=never fails instead).
"""

from __future__ import annotations

import signal
import sys
import time
from functools import partial

from align.config.hardware import (
    is_launched,
    main_process,
    run_processes,
    use_deterministic_products,
)
from align.config.parser import parse_command
from align.config.preflight import check_training
from align.config.recipe import Recipe
from align.config.wandb_runs import check_login
from align.data.text_sources import check_sources
from align.training.checkpoints import check_named
from specalign.common.errors import UserError, cli


@cli
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    recipe = parse_command(arguments, "align.train", __doc__ or "")
    if recipe is None:
        return
    check_training(
        recipe,
        partial(check_login, recipe),
        partial(check_sources, recipe.data),
        partial(check_named, recipe.trainer.resume),
    )
    use_deterministic_products()
    if recipe.processes > 1 and not is_launched():
        code = run_processes(recipe, "align.train", arguments)
    else:
        code = _train(recipe, arguments)
    if code:
        raise SystemExit(code)


def _train(recipe: Recipe, arguments: list[str]) -> int:
    # imported late: torch, Lightning and transformers take seconds
    from align.training.run import run_command

    try:
        return run_command(recipe, arguments)
    except UserError:
        if not main_process():
            # the main process usually reports the same error first, and the launcher ends this one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        raise


if __name__ == "__main__":
    main()
