"""How training is run: Trainer, strategies, loggers, checkpoints, progress. The only file that knows DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, Strategy
from torch import nn

from align import checkpoints
from align.calibrate import Calibrate
from align.errors import UserError
from align.keeper import Keeper
from align.machine import accelerator, devices, main_process, precision
from align.metrics_file import MetricsFile
from align.progress import Teller
from align.recipe import Recipe
from align.target import Target

# ---- strategies ----


class Zero(DeepSpeedStrategy):
    """DeepSpeed's ZeRO; besides GPUs also over gloo on CPU processes, which Lightning's own refuses."""

    @property
    def on_cpu(self) -> bool:
        return os.environ.get("DS_ACCELERATOR") == "cpu"

    def setup_environment(self) -> None:
        if not self.on_cpu:
            super().setup_environment()
            return
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        if not self.on_cpu:
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._without_compiler()
        self._init_deepspeed_distributed()

    @staticmethod
    def _without_compiler() -> None:
        """Leave out DeepSpeed's shared-memory reductions, gloo's do: they are compiled at the first start, and a
        start that is killed meanwhile leaves a lock behind, at which all later ones would wait for ever."""
        import deepspeed.ops

        compatible = getattr(deepspeed.ops, "__compatible_ops__", {})
        compatible["deepspeed_shm_comm"] = False

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0) if self.on_cpu else super().root_device

    @contextmanager
    def whole_parameters(self, parameters: list[nn.Parameter], write: bool) -> Iterator[None]:
        """ZeRO-3 keeps a part of every weight in each process: put them together, and apart again with what was written."""
        if not self.zero_stage_3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if write else None):
            yield


class Launched(LightningEnvironment):
    """Processes started by another launcher that says who is who in RANK, WORLD_SIZE and LOCAL_RANK.

    The deepspeed launcher sets no NODE_RANK, from which Lightning would work out the rank.
    """

    def __init__(self) -> None:
        super().__init__()
        super().set_world_size(int(os.environ["WORLD_SIZE"]))
        super().set_global_rank(int(os.environ["RANK"]))

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def set_world_size(self, size: int) -> None:
        """Said by the launcher."""

    def set_global_rank(self, rank: int) -> None:
        """Said by the launcher."""

    def teardown(self) -> None:
        """The launcher's variables stay."""


def _environment() -> list[Any]:
    launched = {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys()
    return [Launched()] if launched and "TORCHELASTIC_RUN_ID" not in os.environ else []


def _strategy(recipe: Recipe, place: str) -> Strategy | str:
    name = recipe.launch.strategy
    if name.startswith("deepspeed"):
        if place == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"
        share = recipe.trainer.batch_size // (recipe.trainer.accumulate * recipe.processes)
        backend = "gloo" if place == "cpu" else None
        return Zero(stage=int(name[-1]), process_group_backend=backend, logging_batch_size_per_gpu=share)
    return "auto" if name == "auto" and recipe.processes == 1 else DDPStrategy(broadcast_buffers=False)


def _kind(recipe: Recipe) -> str:
    """Checkpoints of one kind can be read by that kind alone."""
    deepspeed = recipe.launch.strategy.startswith("deepspeed")
    return f"{recipe.launch.strategy} on {recipe.processes} processes" if deepspeed else "one file"


# ---- loggers ----


class CSVFile(Logger):
    """<output>/metrics.csv."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.file = MetricsFile(folder / "metrics.csv")

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.file.add(step or 0, metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They are in recipe.yaml."""


def _sends_nothing() -> bool:
    """W&B stays offline unless the user has set a key or a mode that goes online."""
    mode = os.environ.get("WANDB_MODE")
    return mode in ("offline", "dryrun", "disabled") or (mode is None and not os.environ.get("WANDB_API_KEY"))


def _loggers(recipe: Recipe) -> list[Logger]:
    folder, found = Path(recipe.output), list[Logger]()
    for name in dict.fromkeys(recipe.trainer.logger):
        if name == "tensorboard":
            found.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
        elif name == "wandb":
            folder.mkdir(parents=True, exist_ok=True)
            project = os.environ.get("WANDB_PROJECT") or "align"
            found.append(
                WandbLogger(project=project, name=recipe.name, save_dir=str(folder), offline=_sends_nothing())
            )
        else:
            found.append(CSVFile(folder))
    return found


class Reports(Callback):
    """What is done after every step and every validation: tell first, then keep, so that a checkpoint's window is told."""

    def __init__(self, teller: Teller, keeper: Keeper, accumulate: int, validate_first: bool) -> None:
        self.teller, self.keeper, self.accumulate = teller, keeper, accumulate
        self.validate_first = validate_first

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CSVFile) and trainer.is_global_zero:
                logger.file.rewind(trainer.global_step)
        if self.validate_first and trainer.global_step == 0:
            pl_module.validate_now()
            self._log(trainer, self.teller.validated(0, pl_module))
        self.teller.started(trainer.global_step, pl_module)
        self.keeper.started(trainer.global_step, pl_module)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.accumulate == 0:
            self._log(trainer, self.teller.step_taken(trainer.global_step, pl_module))
            self.keeper.step_taken(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._log(trainer, self.teller.validated(trainer.global_step, pl_module))
        self.keeper.step_is_over(trainer, pl_module)

    def _log(self, trainer: lightning.Trainer, numbers: dict[str, float]) -> None:
        for logger in trainer.loggers if numbers and trainer.is_global_zero else []:
            logger.log_metrics(numbers, trainer.global_step)
            logger.save()

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        self.keeper.ended()


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
                Teller(recipe, quiet or not main_process()),
                Keeper(recipe, _settings(recipe)),
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
    module: Calibrate,
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
