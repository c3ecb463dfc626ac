"""A training run from its recipe to the saved drafter: target, data, drafter, training, saving."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch

from align.config.hardware import main_process, target_device
from align.config.launching import thread_share
from align.config.recipe import Recipe
from align.config.run_record import save_run_record
from align.data.supply import Supply, open_supply
from align.training import checkpoints
from align.training.base_module import Drafter, DrafterModule
from align.training.build import (
    MODULES,
    conditioning,
    draft_vocab,
    make_drafter,
    needs_vocabulary,
    save_trained,
)
from align.training.callbacks import MilestoneCallback
from align.training.checkpoints import Checkpoint
from align.training.datamodule import RowsModule
from align.training.messages import gain_line, list_notes, next_commands
from align.training.parallel.strategies import is_one_file
from align.training.schedule import count_text_rows
from align.training.store_outputs import check_stored
from align.training.trainer import build_trainer, read_settings
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.lm.loading import load_target
from specalign.lm.model import Target


def train(recipe: Recipe, quiet: bool = False, argv: Sequence[str] | None = None) -> DrafterModule:
    """Run a recipe to its end and save the drafter to <output>/drafter.

    The step itself, data → forward → loss, is `DrafterModule.training_step`. Raises UserError:
    wrong input. NonFiniteLoss, Interrupted: training stopped early."""
    quiet = quiet or not main_process()
    placement: JsonObject = {"device": "cpu", "fast": False}  # to be sharded
    if recipe.target.parallel == "replicate":
        placement = {"device": target_device(recipe)}
    target = load_target(recipe.target.name, **placement, **recipe.target_options)
    drafter, supply, resume = _open(recipe, target, quiet)
    if resume is not None:
        checkpoints.check_same_run(resume, drafter.config.to_dict(), read_settings(recipe))
        _check_steps(recipe, resume)

    text_rows = count_text_rows(recipe, None if resume is None else resume.seal)
    stream = supply.stream(recipe, text_rows)
    block_size = drafter.config.block_size
    rows = RowsModule(recipe, stream, supply.validation, block_size, supply.exact)
    module = MODULES[recipe.drafter.kind](drafter, recipe, text_rows)
    if recipe.target.parallel == "absent":
        assert module.target_cache is not None and module.target_cache.store is not None
        places = recipe.trainer.max_steps * recipe.trainer.batch_size
        check_stored(recipe, module.target_cache.store, rows.held_out, stream, places)
    if main_process():
        save_run_record(recipe, argv)
    if not quiet:
        for line in (supply.line(recipe), *list_notes(module, resume)):
            say(line, error=True)

    milestones = MilestoneCallback(
        module, lambda steps, name: save_trained(module, supply, steps, name)
    )
    trainer = fit(module, rows, resume, quiet, milestones)
    if trainer.is_global_zero:
        folder = save_trained(module, supply, trainer.global_step)
        if not quiet:
            _report(module, folder, trainer.global_step)
    return module


def _check_steps(recipe: Recipe, resume: Checkpoint) -> None:
    """Raises UserError for a checkpoint after the recipe's last step, or of another batch size."""
    t, done = recipe.trainer, resume.seal.step
    if done > t.max_steps:
        raise UserError(f"trainer.max_steps={t.max_steps}: {resume.path} already has {done} steps")
    batch_size = resume.seal.schedule.get("batch_size", t.batch_size)
    if batch_size != t.batch_size:
        raise UserError(
            f"{resume.path}: saved under trainer.batch_size={batch_size}; give the same"
        )


def _open(recipe: Recipe, target: Target, quiet: bool) -> tuple[Drafter, Supply, Checkpoint | None]:
    """The drafter, its data, and the checkpoint to resume from.

    What can fail without data comes first: generating them may take hours.
    """
    options = recipe.drafter
    if needs_vocabulary(options):
        conditioning(options, target)
    else:
        drafter = make_drafter(target, options, None, recipe.seed)
    supply = open_supply(recipe, target, quiet)
    folder = Path(recipe.output) / "checkpoints"
    resume = checkpoints.find_resume(folder, recipe.trainer.resume, target.hash)
    if needs_vocabulary(options):
        vocab = draft_vocab(recipe, target, supply, resume)
        drafter = make_drafter(target, options, vocab, recipe.seed)
    return drafter, supply, resume


def fit(
    module: DrafterModule,
    rows: RowsModule,
    resume: Checkpoint | None,
    quiet: bool = False,
    callback: lightning.Callback | None = None,
) -> lightning.Trainer:
    """Train, resuming from a checkpoint of the same run; sets `module.final_weights`, the weights
    to save. Raises Interrupted, NonFiniteLoss: training stopped early. KeyboardInterrupt: a signal
    outside of the steps."""
    recipe, t = module.recipe, module.recipe.trainer
    max_steps = t.max_steps
    if resume is not None and t.max_minutes and resume.seal.seconds >= 60 * t.max_minutes:
        max_steps = resume.seal.step
    if main_process():
        folder = Path(recipe.output) / "checkpoints"
        checkpoints.clear_parts(folder)
        if resume is None:
            checkpoints.set_aside(folder)
    if recipe.launch.devices > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(thread_share(recipe.launch.devices))
    trainer = build_trainer(module, max_steps, quiet, callback)
    try:
        path = None if resume is None else str(resume.path)
        trainer.fit(module, rows, ckpt_path=path, weights_only=is_one_file(recipe.launch.strategy))
    except SystemExit as stop:  # Lightning's answer to a signal before or after the steps
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    if not module.final_weights:  # the checkpoint was the end of the run
        module.copy_final_weights()
    return trainer


def _report(module: DrafterModule, folder: Path, steps: int) -> None:
    t = module.recipe.trainer
    if steps < t.max_steps:
        limit = f"trainer.max_minutes={t.max_minutes:g}"
        say(f"{limit} ended training after {steps} of {t.max_steps} steps")
    gain = gain_line(module.first_numbers, module.validation_numbers)
    if gain:
        say(gain)
    say(next_commands(module.recipe, folder))
