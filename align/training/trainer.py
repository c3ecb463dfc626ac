"""Lightning's Trainer for a recipe."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Literal

import lightning
import torch

from align.config.hardware import accelerator, devices, main_process
from align.config.recipe import Recipe
from align.training.base_module import DrafterModule
from align.training.callbacks import CheckpointCallback, ProgressLogger
from align.training.checkpoints import Settings
from align.training.loggers import build_loggers
from align.training.parallel.strategies import build_plugins, build_strategy, checkpoint_kind
from specalign.common.errors import UserError


def build_trainer(
    module: DrafterModule,
    max_steps: int,
    quiet: bool = False,
    callback: lightning.Callback | None = None,
) -> lightning.Trainer:
    """The Trainer of a module; `callback` runs after each step, before it is saved. Raises
    UserError: fp32 training with a target in half precision."""
    recipe, half_target = module.recipe, module.drafter.target.dtype != torch.float32
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)  # hides banners
    warnings.filterwarnings("ignore", module="lightning")
    t, output = recipe.trainer, Path(recipe.output)
    device = accelerator(recipe)
    precision = _choose_precision(t.precision, half_target)
    if device == "gpu" and precision == "bf16-mixed":
        torch.set_float32_matmul_precision("high")  # TF32 for the remaining fp32 products
    callbacks = [
        ProgressLogger(module, quiet or not main_process()),
        *([] if callback is None else [callback]),
        CheckpointCallback(module, output / "checkpoints", read_settings(recipe)),
    ]
    return lightning.Trainer(
        accelerator=device,
        devices=devices(recipe),
        num_nodes=recipe.launch.num_nodes,
        strategy=build_strategy(recipe, device),
        plugins=build_plugins(recipe.launch.strategy),
        precision=precision,
        max_steps=max_steps,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.gradient_clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        logger=build_loggers(t, recipe.name, output),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        callbacks=callbacks,
        default_root_dir=recipe.output,
    )


def _choose_precision(name: str, half_target: bool) -> Literal["bf16-mixed", "32-true"]:
    """The compute type; weights and optimizer are always fp32."""
    if name == "fp32" and half_target:
        raise UserError("trainer.precision=fp32 needs a target in fp32: add target.dtype=float32")
    if name == "bf16" or (name == "auto" and half_target):
        return "bf16-mixed"
    return "32-true"


def read_settings(recipe: Recipe) -> Settings:
    """What a run must share with the checkpoint that it resumes from."""
    return Settings(
        stage=recipe.stage, train=recipe.drafter.train, strategy=checkpoint_kind(recipe)
    )
