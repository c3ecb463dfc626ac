"""Callbacks after every step and validation: progress lines and metrics, then checkpoints and
stopping, so that a checkpoint's window of means begins after the line that reports it."""

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from align.training import checkpoints
from align.training.base_module import DrafterModule, Interrupted
from align.training.strategies import checkpoint_kind
from specalign.common.text import clock, say


class StepCallback(Callback):
    """Calls `end_step` after each optimizer step of one module."""

    def __init__(self, module: DrafterModule) -> None:
        self.module = module
        self.options = module.recipe.trainer

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: object, outputs: object, batch: object, index: int
    ) -> None:
        if (index + 1) % self.options.accumulate == 0:
            self.end_step(trainer)

    def end_step(self, trainer: Trainer) -> None:
        """Called after each optimizer step."""


class ProgressLogger(StepCallback):
    """Prints a line, unless `quiet`, and logs metrics every `log_every` steps and after each
    validation."""

    def __init__(self, module: DrafterModule, quiet: bool) -> None:
        super().__init__(module)
        self.quiet = quiet

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        self._first_step = trainer.global_step
        self._start = time.monotonic()
        self._restart_rate()

    def _restart_rate(self) -> None:
        self._positions = self.module.progress.positions
        self._since = time.monotonic()

    def end_step(self, trainer: Trainer) -> None:
        t, step, now = self.options, trainer.global_step, time.monotonic()
        if step % t.log_every:
            return
        self.module.read_progress()
        progress = self.module.progress
        means = progress.take_means()
        rate = (progress.positions - self._positions) / max(now - self._since, 1e-9)
        numbers = {f"train/{name}": mean for name, mean in means.items()}
        numbers["train/learning_rate"] = trainer.optimizers[0].param_groups[0]["lr"]
        numbers["train/positions_per_second"] = rate
        numbers["train/tokens_seen"] = float(progress.tokens_seen)
        self._restart_rate()
        left = (now - self._start) / max(step - self._first_step, 1) * (t.max_steps - step)
        if t.max_minutes is not None:
            left = min(left, max(0.0, 60 * t.max_minutes - progress.seconds))
        unit = "token" if self.module.recipe.stage == "pretrain" else "block"
        tau = f"expected τ {means['expected_tau']:.3f}  " if "expected_tau" in means else ""
        line = f"step {step}/{t.max_steps}  loss {means['loss']:.4f} per {unit}  {tau}"
        self._report(trainer, f"{line}{rate:.0f} positions/s  {clock(left)} left", numbers)

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        numbers = self.module.validation_numbers
        line = validation_line(trainer.global_step, numbers)
        self._report(trainer, line, {f"validation/{k}": v for k, v in numbers.items()})
        self._restart_rate()  # validation does not count in it

    def _report(self, trainer: Trainer, line: str, numbers: dict[str, float]) -> None:
        if not self.quiet:
            say(line)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(numbers, trainer.global_step)
            logger.save()


def validation_line(step: int, numbers: Mapping[str, float]) -> str:
    """Loss, bound, expected τ with its standard error, and acceptance at each position."""
    parts = [f"validation at step {step}: loss {numbers['loss']:.4f} per block"]
    if "bound" in numbers:
        parts.append(
            f"bound {numbers['bound']:.3f}±{numbers['bound_se']:.3f} nats per token "
            f"(perplexity {numbers['perplexity']:.0f})"
        )
    taus = []
    for name, temperature in (("greedy", 0), ("sampling", 1)):
        if f"tau_{name}" in numbers:
            taus.append(f"{numbers[f'tau_{name}']:.3f}±{numbers[f'tau_{name}_se']:.3f} {name}")
        else:
            taus.append(f"unknown {name} (no held-out text at temperature {temperature})")
    parts.append(f"expected τ {', '.join(taus)}")
    acceptance = [f"{v:.3f}" for k, v in numbers.items() if k.startswith("acceptance_")]
    return f"{', '.join(parts)}; acceptance by position {' '.join(acceptance)}"


class MilestoneCallback(StepCallback):
    """Saves the drafter, averaged if EMA is on, after the step that reaches one of
    `trainer.milestones`. `save`: (steps, folder name) → saves `module.final_weights`; called in the
    main process."""

    def __init__(self, module: DrafterModule, save: Callable[[int, str], object]) -> None:
        super().__init__(module)
        self.save = save

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        self._seen = self.module.progress.tokens_seen

    def end_step(self, trainer: Trainer) -> None:
        if not self.options.milestones:
            return
        self.module.read_progress()
        before, self._seen = self._seen, self.module.progress.tokens_seen
        passed = [m for m in sorted(self.options.milestones) if before < m <= self._seen]
        if passed:
            self.module.copy_final_weights()
            for tokens in passed if trainer.is_global_zero else ():
                self.save(trainer.global_step, f"milestones/{tokens}")
            self.module.final_weights = {}  # set at the end of training


class CheckpointCallback(StepCallback):
    """Saves checkpoints and stops, on a GPU one step after a signal. A validated step is saved after its validation, so that resuming
    repeats nothing."""

    def __init__(self, module: DrafterModule) -> None:
        super().__init__(module)
        self.folder = Path(module.recipe.output) / "checkpoints"
        self._handlers: dict[int, signal.Handlers | Callable[..., object] | int | None] = {}
        self._saved_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: object) -> None:
        """From here on, a signal stops training after the current step."""
        self._saved_step = trainer.global_step

        def request_stop(number: int, frame: object) -> None:
            self.module.progress.stop_wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, request_stop)

    def end_step(self, trainer: Trainer) -> None:
        step, limit = trainer.global_step, self.options.max_minutes
        out_of_time = limit is not None and self.module.progress.seconds >= 60 * limit
        if step == self.options.max_steps or out_of_time:
            trainer.should_stop = True  # after a last validation
        elif step % self.options.validate_every:
            self._save_or_stop(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: object) -> None:
        if trainer.global_step:  # not `trainer.validate_first`
            self._save_or_stop(trainer)

    def _save_or_stop(self, trainer: Trainer) -> None:
        """Save if it is time. Raises Interrupted after a signal."""
        is_due = trainer.global_step % self.options.checkpoint_every == 0
        stopping = self.module.progress.stopping
        if (is_due or trainer.should_stop or stopping) and trainer.global_step != self._saved_step:
            self._save(trainer)
        if stopping and not trainer.should_stop:
            raise Interrupted(
                f"stopped by a signal after step {trainer.global_step}; a checkpoint is saved: "
                "rerun the command to resume"
            )

    def _save(self, trainer: Trainer) -> None:
        """Save a complete checkpoint of this step; remove older ones beyond `keep_checkpoints`."""
        module, recipe = self.module, self.module.recipe
        path = checkpoints.place(self.folder, trainer.global_step)
        try:
            trainer.save_checkpoint(str(checkpoints.part(path)))
        except BaseException:  # a full disk: free the space
            checkpoints.remove(checkpoints.part(path))
            raise
        trainer.strategy.barrier()  # every process has written its part
        if trainer.is_global_zero:
            config, vocab = module.drafter.config, module.drafter.draft_vocab
            record = checkpoints.Seal(
                stage=recipe.stage,
                train=recipe.drafter.train,
                strategy=checkpoint_kind(recipe),
                step=trainer.global_step,
                seconds=module.progress.seconds,
                target_sha256=config.target_sha256,
                drafter=config.to_dict(),
                draft_vocab=None if vocab is None else vocab.tolist(),
                schedule={"batch_size": self.options.batch_size, "text_rows": module.text_rows},
            )
            checkpoints.seal(path, record)
            checkpoints.prune(self.folder, self.options.keep_checkpoints)
        trainer.strategy.barrier()
        self._saved_step = trainer.global_step

    def teardown(self, trainer: Trainer, pl_module: object, stage: str) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())
