"""`python -m align.train recipe=NAME …`: train a drafter towards its target on text that the target
generates. Missing text is generated first (data.write=never refuses)."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from align.config.hardware import is_launched, main_process
from align.config.launching import RESUMES, adopt_slurm, run_processes, use_deterministic_products
from align.config.parser import parse_command
from align.config.preflight import check_training
from align.config.recipe import Recipe
from align.config.wandb_runs import check_login, trial_note
from align.data.text_sources import check_sources
from align.training.checkpoints import check_named
from specalign.common.claims import Claim
from specalign.common.errors import UserError, cli
from specalign.common.text import say


@cli
def main(argv: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    adopt_slurm()
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
        if code:
            raise SystemExit(code)
        return
    try:
        _train(recipe, arguments)
    except UserError:
        if not main_process():
            # the main process usually reports the same error first, and the launcher ends this one
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(3)
        raise


def _train(recipe: Recipe, arguments: list[str]) -> None:
    # imported late: torch, Lightning and transformers take seconds
    from align.training.base_module import Interrupted, NonFiniteLoss
    from align.training.parallel.strategies import is_lost_peer
    from align.training.run import train

    try:
        with ExitStack() as claims:
            if main_process():
                claims.enter_context(Claim(Path(recipe.output), "output"))
                if recipe.trainer.features_gb:
                    claims.enter_context(Claim(recipe.features_folder, "trainer.features_path"))
                note = trial_note(recipe)
                if note:
                    say(note, error=True)
            train(recipe, argv=arguments)
    except (NonFiniteLoss, Interrupted) as stop:
        if not main_process():  # it stopped with the others: not a crash to its launcher
            raise SystemExit(0) from None
        failed = isinstance(stop, NonFiniteLoss)
        say(f"error: {stop}" if failed else str(stop), error=True)
        raise SystemExit(1 if failed else 130) from None
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        # the launcher's signal ends this process too
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if main_process():
            say(f"error: another process has failed or stopped responding; {RESUMES}", error=True)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
