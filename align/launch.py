"""How training is run: Trainer, strategies, loggers, checkpoints, progress. The only file that knows DeepSpeed."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import DDPStrategy, Strategy

from align.checkpoints import newest, place, prune, seal
from align.errors import UserError
from align.recipe import Recipe
from align.target import has_fast_bf16

if TYPE_CHECKING:
    from align.calibrate import Calibrate


class Interrupted(RuntimeError):
    """A signal asked training to stop; a checkpoint was saved."""


def build_trainer(recipe: Recipe, quiet: bool = False) -> lightning.Trainer:
    """The Trainer that a recipe describes.

    Raises:
        UserError: a strategy, device or package that this machine does not have.
    """
    t, launch = recipe.trainer, recipe.launch
    _hush()
    accelerator = launch.accelerator
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "launch.accelerator=gpu was asked for, but torch sees no GPU (launch.accelerator=cpu runs here)"
        )
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu" and launch.devices > torch.cuda.device_count():
        raise UserError(f"launch.devices={launch.devices}: torch sees {torch.cuda.device_count()} GPUs")
    return lightning.Trainer(
        accelerator=accelerator,
        devices=launch.devices,
        num_nodes=launch.num_nodes,
        strategy=_strategy(recipe, accelerator),
        precision=_precision(t.precision, accelerator),
        max_steps=t.max_steps,
        accumulate_grad_batches=t.accumulate,
        gradient_clip_val=t.gradient_clip or None,
        val_check_interval=t.validate_every * t.accumulate,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        limit_val_batches=1.0,
        use_distributed_sampler=False,
        logger=_loggers(recipe),
        log_every_n_steps=t.log_every,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,
        callbacks=[Keeper(recipe), Teller(recipe, quiet)],
        default_root_dir=recipe.output,
    )


def _hush() -> None:
    """Keep Lightning's banners and advertisements off the terminal; errors still come through."""
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")


def _precision(name: str, accelerator: str) -> Any:
    device = torch.device("cuda" if accelerator == "gpu" else "cpu")
    fast = has_fast_bf16(device)
    if name == "bf16" and not fast and accelerator == "gpu":
        raise UserError("trainer.precision=bf16: this GPU has no bf16 products (trainer.precision=fp32 runs)")
    return "bf16-mixed" if name == "bf16" or (name == "auto" and fast) else "32-true"


def _strategy(recipe: Recipe, accelerator: str) -> Strategy | str:
    name = recipe.launch.strategy
    if name == "auto":
        return "auto" if recipe.processes == 1 else DDPStrategy()
    if name == "ddp":
        return DDPStrategy()
    return _deepspeed(int(name[-1]), accelerator)


def _deepspeed(stage: int, accelerator: str) -> Strategy:
    """ZeRO of the given stage. Lightning's strategy refuses CPUs, where ZeRO is how two processes are tested."""
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"launch.strategy=deepspeed_{stage}: the package deepspeed is not installed ({error})"
        ) from None
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class CPUDeepSpeed(DeepSpeedStrategy):
        """The same engine over gloo on CPU processes."""

        def setup_environment(self) -> None:
            assert self.accelerator is not None
            self.accelerator.setup_device(self.root_device)
            self.setup_distributed()

        def setup_distributed(self) -> None:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)

    if accelerator == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return CPUDeepSpeed(stage=stage, process_group_backend="gloo")
    return DeepSpeedStrategy(stage=stage)


def _loggers(recipe: Recipe) -> list[Logger]:
    folder = Path(recipe.output)
    found: list[Logger] = []
    for name in recipe.trainer.logger:
        if name == "tensorboard":
            found.append(TensorBoardLogger(str(folder), name="tensorboard", version=""))
        elif name == "wandb":
            # nothing is sent unless the user has said so with a key or a mode
            offline = os.environ.get("WANDB_MODE", "") == "offline" or not os.environ.get("WANDB_API_KEY")
            folder.mkdir(parents=True, exist_ok=True)
            found.append(
                WandbLogger(project="block-drafter", name=recipe.name, save_dir=str(folder), offline=offline)
            )
        else:
            found.append(AppendingCSV(str(folder)))
    return found


class AppendingCSV(CSVLogger):
    """Lightning's CSV logger into <output>/metrics.csv; what an earlier part of the run wrote is kept."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, name="", version="")
        self._kept: list[dict[str, Any]] = []
        path = Path(folder) / "metrics.csv"
        if path.is_file() and path.stat().st_size:
            import csv

            with path.open(newline="") as file:
                self._kept = [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]
            path.unlink()  # the writer refuses to start over a file; the rows are written again with the next ones

    @property
    def experiment(self) -> Any:
        first = self._experiment is None
        writer = super().experiment
        if first and self._kept and writer is not None:
            writer.metrics = [*self._kept, *writer.metrics]
            writer.metrics_keys = sorted({k for row in writer.metrics for k in row})
            self._kept = []
            writer.save()
        return writer


class Keeper(Callback):
    """Saves checkpoints, and stops in time or on a signal."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.folder = recipe, Path(recipe.output) / "checkpoints"
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._saved = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self._saved = trainer.global_step

        def remember(number: int, frame: object) -> None:
            self.signal = number

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, remember)
            except ValueError:  # not the main thread
                return

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.recipe.trainer.accumulate:
            return
        step = trainer.global_step
        stop = trainer.strategy.reduce_boolean_decision(
            self.signal is not None or pl_module.out_of_time(), all=False
        )
        if step % self.recipe.trainer.checkpoint_every == 0 or step == self.recipe.trainer.max_steps or stop:
            self.save(trainer, pl_module)
        if stop:
            trainer.should_stop = True

    def save(self, trainer: lightning.Trainer, module: Calibrate) -> None:
        """One complete checkpoint of the present step; older ones beyond `keep_checkpoints` go."""
        step = trainer.global_step
        if step == self._saved:
            return
        path = place(self.folder, step)
        trainer.save_checkpoint(str(path))
        if trainer.is_global_zero:
            seal(path, step, module.drafter.config.target_sha256)
            prune(self.folder, self.recipe.trainer.keep_checkpoints)
        trainer.strategy.barrier()
        self._saved = step

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class Teller(Callback):
    """One line every `log_every` steps, and the numbers to the loggers."""

    def __init__(self, recipe: Recipe, quiet: bool) -> None:
        self.recipe, self.quiet = recipe, quiet
        self._clock = (0.0, 0, 0)

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._clock = (time.monotonic(), pl_module.positions, trainer.global_step)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        t = self.recipe.trainer
        step = trainer.global_step
        if (batch_idx + 1) % t.accumulate or step % t.log_every:
            return
        start, positions, first = self._clock
        elapsed = max(time.monotonic() - start, 1e-9)
        rate = (pl_module.positions - positions) / elapsed
        left = elapsed / max(step - first, 1) * (t.max_steps - step)
        if t.max_minutes is not None:
            left = min(left, max(0.0, 60 * t.max_minutes - elapsed))
        numbers = {
            "train/loss": pl_module.train_numbers["loss"],
            "train/expected_tau": pl_module.train_numbers["tau"],
            "train/learning_rate": pl_module.learning_rate(step - 1),
            "train/positions_per_second": rate,
            "train/tokens_seen": float(pl_module.tokens_seen),
        }
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step)
        if not self.quiet and trainer.is_global_zero:
            print(
                f"step {step}/{t.max_steps}  loss {numbers['train/loss']:.4f}  expected τ {numbers['train/expected_tau']:.3f}  "
                f"{rate:.0f} positions/s  {_clock(left)} left",
                flush=True,
            )

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        numbers = {f"validation/{k}": v for k, v in pl_module.validation_numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, trainer.global_step)
            logger.save()
        if not self.quiet and trainer.is_global_zero:
            n = pl_module.validation_numbers
            each = " ".join(f"{v:.3f}" for k, v in n.items() if k.startswith("acceptance_"))
            print(
                f"validation at step {trainer.global_step}: τ {n['tau_greedy']:.3f}±{n['tau_greedy_se']:.3f} greedy, "
                f"{n['tau_sampling']:.3f}±{n['tau_sampling_se']:.3f} sampling; acceptance by position {each}",
                flush=True,
            )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def fit(
    recipe: Recipe, module: Calibrate, rows: lightning.LightningDataModule, quiet: bool = False
) -> lightning.Trainer:
    """Train, going on from a checkpoint where the recipe says so.

    Raises:
        UserError: a checkpoint that does not fit. Interrupted: a signal came; the run can be resumed.
    """
    trainer = build_trainer(recipe, quiet)
    path = newest(
        Path(recipe.output) / "checkpoints", recipe.trainer.resume, module.drafter.config.target_sha256
    )
    if path is not None and not quiet:
        print(f"going on from {path}", file=sys.stderr)
    trainer.fit(module, rows, ckpt_path=None if path is None else str(path), weights_only=True)
    keeper = next(c for c in trainer.callbacks if isinstance(c, Keeper))  # type: ignore[attr-defined]
    if keeper.signal is not None:
        raise Interrupted(
            f"stopped by signal {keeper.signal} after step {trainer.global_step}; the same command goes on from there"
        )
    return trainer
