"""How training is run: Trainer, strategies, loggers, checkpoints, progress. The only file that knows DeepSpeed."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning

from align.common.errors import UserError
from align.config.recipe import Recipe
from align.target.model import Target
from align.training import checkpoints
from align.training.block_module import BlockDrafterModule
from align.training.callbacks import CheckpointCallback, ProgressLogger, Reports
from align.training.hardware import accelerator, devices, main_process, precision
from align.training.loggers import _loggers
from align.training.strategies import _environment, _kind, _strategy

# ---- strategies ----


# ---- loggers ----


# ---- the run ----


def _hush() -> None:
    """Keep Lightning's banners and advertisements off the terminal; errors still come through."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def build_trainer(recipe: Recipe, target: Target, max_steps: int, quiet: bool = False) -> lightning.Trainer:
    """The Trainer that a recipe describes.

    Raises:
        UserError: a strategy, device or package that this machine does not have.
    """
    _hush()
    t, place = recipe.trainer, accelerator(recipe)
    return lightning.Trainer(
        accelerator=place,
        devices=devices(recipe),
        num_nodes=recipe.launch.num_nodes,
        strategy=_strategy(recipe, place),
        plugins=_environment() or None,
        precision=precision(recipe, target),
        max_steps=max_steps,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.gradient_clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=_loggers(recipe),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        callbacks=[
            Reports(
                ProgressLogger(recipe, quiet or not main_process()),
                CheckpointCallback(recipe, _settings(recipe)),
                t.accumulate,
                t.validate_first,
            )
        ],
        default_root_dir=recipe.output,
    )


def _settings(recipe: Recipe) -> dict[str, str]:
    return {"stage": recipe.stage, "train": recipe.drafter.train, "strategy": _kind(recipe)}


def check_resume(recipe: Recipe, drafter: dict[str, Any], resume: Path) -> None:
    """Raises UserError for a checkpoint that this recipe can't go on from; `drafter`: its config."""
    checkpoints.check_same_run(resume, drafter, _settings(recipe))
    steps, done = recipe.trainer.max_steps, checkpoints.read_seal(resume)["step"]
    if done > steps:
        raise UserError(f"trainer.max_steps={steps}: {resume} has {done} steps behind it")


def fit(
    recipe: Recipe,
    module: BlockDrafterModule,
    rows: lightning.LightningDataModule,
    resume: Path | None,
    quiet: bool = False,
) -> lightning.Trainer:
    """Train, going on from the checkpoint `resume`, which `check_resume` has seen; afterwards `module.final_weights` are what
    is to be saved.

    Raises:
        Interrupted, NonFiniteLoss: training stopped before its end.
    """
    steps, t = recipe.trainer.max_steps, recipe.trainer
    if resume is not None:
        done = checkpoints.read_seal(resume)
        over = t.max_minutes is not None and done["seconds"] >= 60 * t.max_minutes
        steps = done["step"] if over else steps
    elif main_process():
        checkpoints.set_aside(Path(recipe.output) / "checkpoints")
    trainer = build_trainer(recipe, module.drafter.target, steps, quiet)
    trainer.fit(
        module,
        rows,
        ckpt_path=None if resume is None else str(resume),
        weights_only=_kind(recipe) == "one file",
    )
    if not module.final_weights:  # the checkpoint was the end of the run: nothing was left to train
        module.keep_final()
    return trainer
