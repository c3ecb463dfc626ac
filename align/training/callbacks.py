"""Callbacks after every step and validation: progress lines and metrics, then checkpoints and
stopping.

In this order, so that a checkpoint's window of means begins after the line that reports it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from align.config.trainer import TrainerConfig
from align.training import checkpoints
from align.training.base_module import DrafterModule, Interrupted
from align.training.loggers import CSVFile
from align.training.messages import training_line, validation_line
from specalign.common.text import say


class ProgressLogger(Callback):
    """Prints a line, unless `quiet`, and logs metrics every `log_every` steps and after each
    validation."""

    def __init__(self, options: TrainerConfig, stage: str, quiet: bool) -> None:
        self.options = options
        self.quiet = quiet
        self._unit = "token" if stage == "pretrain" else "block"
        self._first_step = self._positions = 0
        self._start = self._since = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CSVFile) and trainer.is_global_zero:
                logger.file.rewind(trainer.global_step or -1)  # step 0 is repeated too
        if self.options.validate_first and trainer.global_step == 0:
            pl_module.validate_now()
            pl_module.first_numbers = dict(pl_module.validation_numbers)
            self.on_validation_end(trainer, pl_module)
        self._first_step = trainer.global_step
        self._positions = pl_module.progress.positions
        self._start = self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        t, step, now = self.options, trainer.global_step, time.monotonic()
        if (batch_idx + 1) % t.accumulate or step % t.log_every:
            return
        progress = pl_module.progress
        means = progress.take_means()
        positions = progress.positions - self._positions
        numbers = {"train/loss": means["loss"]}
        if "tau" in means:
            numbers["train/expected_tau"] = means["tau"]
        numbers["train/learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        numbers["train/positions_per_second"] = positions / max(now - self._since, 1e-9)
        numbers["train/tokens_seen"] = float(progress.tokens_seen)
        self._positions, self._since = progress.positions, now
        left = (now - self._start) / max(step - self._first_step, 1) * (t.max_steps - step)
        if t.max_minutes is not None:
            left = min(left, max(0.0, 60 * t.max_minutes - progress.seconds))
        self._report(trainer, training_line(step, t.max_steps, numbers, left, self._unit), numbers)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        numbers = pl_module.validation_numbers
        line = validation_line(trainer.global_step, numbers)
        self._report(trainer, line, {f"validation/{k}": v for k, v in numbers.items()})
        # validation does not count in the training rate
        self._positions, self._since = pl_module.progress.positions, time.monotonic()

    def _report(self, trainer: lightning.Trainer, line: str, numbers: dict[str, float]) -> None:
        if not self.quiet:
            say(line)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(numbers, trainer.global_step)
            logger.save()


class MilestoneCallback(Callback):
    """Saves the drafter, averaged if EMA is on, after the step that reaches a milestone.

    Args:
        milestones: text tokens. save: (steps, folder name) → saves `module.final_weights`; called
            in the main process.
    """

    def __init__(self, milestones: Sequence[int], save: Callable[[int, str], object]) -> None:
        self.milestones, self.save = sorted(milestones), save
        self._seen = 0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._seen = pl_module.progress.tokens_seen

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % pl_module.recipe.trainer.accumulate:
            return
        before, self._seen = self._seen, pl_module.progress.tokens_seen
        passed = [m for m in self.milestones if before < m <= self._seen]
        if passed:
            pl_module.copy_final_weights()
            for tokens in passed if trainer.is_global_zero else ():
                self.save(trainer.global_step, f"milestones/{tokens}")
            pl_module.final_weights = {}  # set at the end of training


class CheckpointCallback(Callback):
    """Saves checkpoints and stops. A validated step is saved after its validation, so that resuming
    repeats nothing.

    Args:
        settings: what a run that resumes must share with this one.
    """

    def __init__(
        self, options: TrainerConfig, folder: Path, settings: checkpoints.Settings
    ) -> None:
        self.options = options
        self.folder = folder
        self.settings = settings
        self._handlers: dict[int, Any] = {}
        self._saved_step = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """From now on a signal stops training after the step."""
        self._saved_step = trainer.global_step

        def request_stop(number: int, frame: object) -> None:
            pl_module.progress.stop_wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, request_stop)
            except ValueError:  # not the main thread
                return

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % self.options.accumulate:
            return
        step, limit = trainer.global_step, self.options.max_minutes
        out_of_time = limit is not None and pl_module.progress.seconds >= 60 * limit
        if step == self.options.max_steps or out_of_time:
            trainer.should_stop = True  # after a last validation
        elif step % self.options.validate_every:
            self._end_step(trainer, pl_module)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self._end_step(trainer, pl_module)

    def _end_step(self, trainer: lightning.Trainer, module: DrafterModule) -> None:
        """Save if it is time. Raises Interrupted after a signal."""
        is_due = trainer.global_step % self.options.checkpoint_every == 0
        stopping = module.progress.stopping
        if is_due or trainer.should_stop or stopping:
            self._save(trainer, module)
        if stopping and not trainer.should_stop:
            raise Interrupted(
                f"stopped by a signal after step {trainer.global_step}; a checkpoint is saved, "
                "rerun the command to resume"
            )

    def _save(self, trainer: lightning.Trainer, module: DrafterModule) -> None:
        """Save a complete checkpoint of this step; remove older ones beyond `keep_checkpoints`."""
        step = trainer.global_step
        if step == self._saved_step:
            return
        path = checkpoints.place(self.folder, step)
        try:
            trainer.save_checkpoint(str(checkpoints.part(path)))
        except BaseException:  # a full disk: free the space
            checkpoints.remove(checkpoints.part(path))
            raise
        trainer.strategy.barrier()  # every process has written its part
        if trainer.is_global_zero:
            config, vocab = module.drafter.config, module.drafter.draft_vocab
            record = checkpoints.Seal(
                **vars(self.settings),
                step=step,
                seconds=module.progress.seconds,
                target_sha256=config.target_sha256,
                drafter=config.to_dict(),
                draft_vocab=None if vocab is None else vocab.tolist(),
                schedule=module.schedule.record,
            )
            checkpoints.seal(path, record)
            checkpoints.prune(self.folder, self.options.keep_checkpoints)
        trainer.strategy.barrier()
        self._saved_step = step

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Restore the signal handlers."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
