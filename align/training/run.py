"""One training run, from its recipe to the saved drafter: data, drafter, Trainer, saving."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import lightning
import torch

from align.common.commands import command
from align.common.errors import UserError
from align.common.text import plural, say
from align.config.hardware import accelerator, devices, main_process, target_place
from align.config.launching import thread_share
from align.config.preflight import check_memory, check_training
from align.config.recipe import Recipe
from align.config.run_record import save_run_record
from align.data.packing import collate
from align.data.supply import open_supply
from align.folder.chat import Chat
from align.outputs.row import row_key
from align.target.loading import load_target
from align.target.model import Target
from align.training import checkpoints
from align.training.base_module import DrafterModule
from align.training.build import KINDS, conditioning, draft_vocab, save_trained
from align.training.callbacks import CheckpointCallback, MilestoneCallback, ProgressLogger, gain_line
from align.training.datamodule import RowsModule, distinct_places
from align.training.loggers import build_loggers, log_artifacts
from align.training.parallel.strategies import build_strategy, checkpoint_kind, is_one_file, plugins
from align.training.schedule import change_note, resumed_schedule


def train(recipe: Recipe, quiet: bool = False, argv: Sequence[str] | None = None) -> DrafterModule:
    """Run a recipe to its end and save the drafter to <output>/drafter.

    Raises:
        UserError: input that does not fit. NonFiniteLoss, Interrupted: training stopped before its end.
    """
    check_training(recipe)
    output, t, kind = Path(recipe.output), recipe.target, KINDS[recipe.drafter.kind]
    quiet = quiet or not main_process()
    target = load_target(t.name, **target_place(recipe), **recipe.target_options)
    check_memory(recipe, target.hidden_size)
    # what can't be opened is said before the target writes for hours
    later = kind.chosen_vocabulary and recipe.drafter.init is None  # one to start from has its vocabulary
    drafter = None if later else kind.make(target, recipe, None)
    if later:
        conditioning(recipe, target)
    supply = open_supply(recipe, target, quiet)
    resume = checkpoints.newest(output / "checkpoints", recipe.trainer.resume, target.hash)
    if drafter is None:
        drafter = kind.make(target, recipe, draft_vocab(recipe, target, supply, resume))
    seal = None if resume is None else checkpoints.read_seal(resume)
    schedule = resumed_schedule(recipe, seal)
    rows = RowsModule(
        recipe,
        supply.stream(recipe, schedule.text_rows),
        supply.validation,
        drafter.config.block_size,
        supply.exact,
        schedule.row_offset,
    )
    module = kind.module(drafter, recipe)
    module.schedule = schedule
    if t.parallel == "absent":
        _check_stored(recipe, module, rows)
    if resume is not None:
        check_resume(recipe, drafter.config.to_dict(), resume)
    if main_process():
        save_run_record(recipe, output, argv)
    if not quiet:
        say(supply.line(recipe), error=True)
        for line in _notes(recipe, target, resume, change_note(schedule, seal)):
            say(line, error=True)
    on_the_way = MilestoneCallback(
        recipe.trainer.milestones, lambda steps, name: save_trained(module, supply, steps, name)
    )
    trainer = fit(recipe, module, rows, resume, quiet, on_the_way)
    if trainer.is_global_zero:
        steps = trainer.global_step
        if not quiet and steps < recipe.trainer.max_steps:
            minutes, asked = recipe.trainer.max_minutes, recipe.trainer.max_steps
            say(f"trainer.max_minutes={minutes:g} ended it after {steps} of {asked} steps")
        saved = save_trained(module, supply, steps)
        log_artifacts(trainer.loggers, recipe, saved)
        if not quiet:
            if gained := gain_line(module.first_numbers, module.validation_numbers):
                say(gained)
            say(_next(recipe, saved, argv or ()))
    return module


def _notes(recipe: Recipe, target: Target, resume: Path | None, change: str | None) -> list[str]:
    """What to tell before training begins. change: what a resumed run does otherwise than its checkpoint."""
    notes = []
    if target.stepwise:
        notes.append(
            f"note: target {target.spec!r} continues its state token by token, so verifying drafts saves nothing: no drafter makes it "
            "faster here"
        )
    if resume is not None:
        notes.append(_going_on(recipe, resume))
    elif recipe.drafter.kind == "ddit" and recipe.drafter.init is None and recipe.stage != "pretrain":
        notes.append("note: no drafter.init: this network starts from nothing")
    return notes if change is None else [*notes, change]


def _check_stored(recipe: Recipe, module: DrafterModule, rows: RowsModule) -> None:
    """Raises UserError where a row that the run reads is not on disk."""
    store = None if module.target_cache is None else module.target_cache.store
    assert store is not None  # a rule of the recipe
    places = distinct_places(rows.stream, module.schedule.rows_before(recipe.trainer.max_steps))
    read = [(row, 1.0) for _, row in rows.held_out]
    every = chain(read, ((rows.stream.row(key), recipe.objective.temperature) for _, key in places))
    lacking = sum(row_key(collate([row]), heat) not in store for row, heat in every)
    if lacking:
        gigabytes = recipe.trainer.features_gb
        if len(store):  # what all rows take, with some to spare
            gigabytes = max(gigabytes, 1.1e-9 * store.bytes / len(store) * (len(store) + lacking))
        words = [
            f"recipe={recipe.name}",
            f"output={recipe.output}",
            f"trainer.features_gb={gigabytes:.3g}",
        ]
        raise UserError(
            f"target.parallel=absent: {plural(lacking, 'row')} of this run not in {recipe.features_folder} "
            f"({command('align.features', *words)} and the run's other words, without target.parallel, store them)"
        )


# ---- the Trainer ----


def _silence_lightning() -> None:
    """Keep Lightning's banners and advertisements off the terminal; errors still come through."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def build_trainer(
    recipe: Recipe,
    target: Target,
    max_steps: int,
    quiet: bool = False,
    on_the_way: lightning.Callback | None = None,
) -> lightning.Trainer:
    """The Trainer that a recipe describes; `on_the_way`: what else is done after a step, before it is saved.

    Raises:
        UserError: a strategy, device or package that this machine does not have.
    """
    _silence_lightning()
    t, place, precision = recipe.trainer, accelerator(recipe), _precision(recipe, target)
    if place == "gpu" and precision == "bf16-mixed":
        # fp32 factors too are rounded, less than to bf16, for many times fp32's speed
        torch.set_float32_matmul_precision("high")
    return lightning.Trainer(
        accelerator=place,
        devices=devices(recipe),
        num_nodes=recipe.launch.num_nodes,
        strategy=build_strategy(recipe, place),
        plugins=plugins(recipe),
        precision=precision,
        max_steps=max_steps,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.gradient_clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=build_loggers(recipe),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        callbacks=[  # in this order: a step is reported, then saved
            ProgressLogger(recipe, quiet or not main_process()),
            *([] if on_the_way is None else [on_the_way]),
            CheckpointCallback(recipe, _settings(recipe)),
        ],
        default_root_dir=recipe.output,
    )


def _precision(recipe: Recipe, target: Target) -> Literal["bf16-mixed", "32-true"]:
    """Lightning's name for the products' type; weights and optimizer stay fp32.

    Raises:
        UserError: fp32 products over a target that is not fp32.
    """
    name, half = recipe.trainer.precision, target.dtype != torch.float32
    if name == "auto":
        name = "bf16" if half else "fp32"
    if name == "fp32" and half:
        raise UserError("trainer.precision=fp32 needs a target in fp32: add target.dtype=float32")
    return "bf16-mixed" if name == "bf16" else "32-true"


def _settings(recipe: Recipe) -> dict[str, str]:
    """What a run that goes on from a checkpoint must have in common with the one that saved it."""
    return {
        "stage": recipe.stage,
        "train": recipe.drafter.train,
        "strategy": checkpoint_kind(recipe),
        "follow": str(recipe.data.follow).lower(),
        "rates": " and ".join(sorted(recipe.trainer.learning_rates)) or "none",
    }


def check_resume(recipe: Recipe, drafter: dict[str, Any], resume: Path) -> None:
    """Raises UserError for a checkpoint that this recipe can't go on from; `drafter`: its config."""
    checkpoints.check_same_run(resume, drafter, _settings(recipe))
    steps, done = recipe.trainer.max_steps, checkpoints.read_seal(resume)["step"]
    if done > steps:
        raise UserError(f"trainer.max_steps={steps}: {resume} has {done} steps behind it")


def fit(
    recipe: Recipe,
    module: DrafterModule,
    rows: lightning.LightningDataModule,
    resume: Path | None,
    quiet: bool = False,
    on_the_way: lightning.Callback | None = None,
) -> lightning.Trainer:
    """Train, going on from the checkpoint `resume`, which `check_resume` has seen; afterwards `module.final_weights` are what
    is to be saved.

    Raises:
        Interrupted, NonFiniteLoss: training stopped before its end. KeyboardInterrupt: a signal outside of the steps.
    """
    steps, t = recipe.trainer.max_steps, recipe.trainer
    folder = Path(recipe.output) / "checkpoints"
    if main_process():  # what the newest one replaced may still be there
        checkpoints.clear_parts(folder, t.keep_checkpoints if resume == checkpoints.latest(folder) else None)
    if resume is not None:
        done = checkpoints.read_seal(resume)
        over = t.max_minutes is not None and done["seconds"] >= 60 * t.max_minutes
        steps = done["step"] if over else steps
    elif main_process():
        checkpoints.set_aside(folder)
    trainer = build_trainer(recipe, module.drafter.target, steps, quiet, on_the_way)
    if recipe.launch.devices > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(thread_share(recipe))
    try:
        trainer.fit(
            module,
            rows,
            ckpt_path=None if resume is None else str(resume),
            weights_only=is_one_file(recipe),
        )
    except SystemExit as stop:  # what Lightning makes of a signal that comes before or after the steps
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        raise
    finally:
        if module.target_cache is not None:
            module.target_cache.close()
    if not module.final_weights:  # the checkpoint was the end of the run: nothing was left to train
        module.copy_final_weights()
    return trainer


# ---- what to do next ----


def _going_on(recipe: Recipe, resume: Path) -> str:
    steps = checkpoints.read_seal(resume)["step"]
    if steps < recipe.trainer.max_steps:
        return f"going on from {resume}"
    return (
        f"{recipe.output} is finished ({steps} steps): nothing is trained; trainer.max_steps={2 * steps} goes on, "
        "trainer.resume=never begins anew"
    )


def _next(recipe: Recipe, folder: Path, argv: Sequence[str]) -> str:
    if recipe.drafter.kind == "ddit" and recipe.drafter.graph == "uniform":
        return f"the drafter is in {folder}; uniform noise has no one-step q, so decode can't use it (absorbing can)"
    target = () if recipe.target.name == type(recipe.target)().name else ("--target", recipe.target.name)
    drafter = ("--drafter", str(folder), *Chat(recipe.data.template_kwargs, recipe.data.system).arguments)
    return (
        f"the drafter is in {folder}; next:\n{_next_stage(recipe, folder, argv)}"
        f"  {command('decode.eval', '--suite', 'builtin', *target, *drafter)}\n"
        f'  {command("decode.generate", *target, *drafter)} "your prompt"'
    )


def _next_stage(recipe: Recipe, folder: Path, argv: Sequence[str]) -> str:
    """The command that goes on from here, on the same data; none after the last stage."""
    stage = {"pretrain": "finetune", "finetune": "calibrate"}.get(recipe.stage)
    if stage is None:
        return ""
    words = [f"recipe={recipe.name}", f"stage={stage}", f"target.name={recipe.target.name}"]
    words += [f"drafter.init={folder}", f"data.path={recipe.data_folder}"]
    same = ("data.", "target.")  # the data are taken for others where their keys differ
    words += [w for w in argv if w.startswith(same) and not w.startswith(("data.path=", "target.name="))]
    words += [f"output={recipe.output}-{stage}"]
    return f"  {command('align.train', *words)}\n"
