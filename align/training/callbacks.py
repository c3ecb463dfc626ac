"""What is done after every step and every validation: progress lines and metrics, then checkpoints and stopping.

The Trainer calls the two in this order, so that a checkpoint's window of means begins after the line that reports it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from align.common.text import clock, say
from align.config.recipe import Recipe
from align.training import checkpoints
from align.training.base_module import DrafterModule, Interrupted
from align.training.loggers import CSVFile


def training_line(step: int, steps: int, numbers: Mapping[str, float], left: float, of: str = "block") -> str:
    """`step 20/100  loss …`: means since the line before, what the loss is `of`, and the time left in seconds."""
    tau = f"expected τ {numbers['train/expected_tau']:.3f}  " if "train/expected_tau" in numbers else ""
    return (
        f"step {step}/{steps}  loss {numbers['train/loss']:.4f} a {of}  {tau}"
        f"{numbers['train/positions_per_second']:.0f} positions/s  {clock(left)} left"
    )


def validation_line(step: int, numbers: Mapping[str, float]) -> str:
    """Expected τ with its standard error, greedy and sampling, the acceptance at each position, and the share of
    drafts accepted up to there."""

    def tau(name: str, needs: str) -> str:
        if f"tau_{name}" not in numbers:
            return f"unknown {name} (no held-out text {needs})"
        return f"{numbers[f'tau_{name}']:.3f}±{numbers[f'tau_{name}_se']:.3f} {name}"

    def by_position(name: str) -> str:
        return " ".join(f"{v:.3f}" for k, v in numbers.items() if k.startswith(name))

    each = by_position("acceptance_")
    sampled, greedy = by_position("kept_sampling_"), by_position("kept_greedy_")
    bound = ""
    if "bound" in numbers:
        bound = f"bound {numbers['bound']:.3f}±{numbers['bound_se']:.3f} nats a token (perplexity {numbers['perplexity']:.0f}), "
    return (
        f"validation at step {step}: loss {numbers['loss']:.4f} a block, {bound}expected τ {tau('greedy', 'at temperature 0')}, "
        f"{tau('sampling', 'at temperature 1')}; chance of acceptance at each drafted position {each}"
        + (f"; of all up to there {sampled or f'{greedy}, greedy'}" if sampled or greedy else "")
    )


def gain_line(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    """Estimated τ on held-out text before and after training, greedy and sampling; None where it was not measured before."""
    parts = []
    for name in ("greedy", "sampling"):
        if f"tau_{name}" not in before or f"tau_{name}" not in now:
            continue
        first, last, error = before[f"tau_{name}"], now[f"tau_{name}"], now[f"tau_{name}_se"]
        clear = "" if abs(last - first) > 1.96 * error else ", within the error of these texts"
        parts.append(
            f"{name} {first:.2f} before, {last:.2f} ± {error:.2f} after ({last / first - 1:+.0%}{clear})"
        )
    return f"τ (estimated on held-out text): {'; '.join(parts)}" if parts else None


class ProgressLogger(Callback):
    """A line and a row of metrics every `log_every` steps, and after each validation; `quiet` prints no line."""

    def __init__(self, recipe: Recipe, quiet: bool) -> None:
        self.options, self.quiet = recipe.trainer, quiet
        self._of = "token" if recipe.stage == "pretrain" else "block"
        self._first = self._positions = 0
        self._start = self._since = 0.0

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, CSVFile) and trainer.is_global_zero:
                logger.file.rewind(trainer.global_step or -1)  # a run's beginning is done again, too
        if self.options.validate_first and trainer.global_step == 0:
            pl_module.validate_now()
            pl_module.first_numbers = dict(pl_module.validation_numbers)
            self.on_validation_end(trainer, pl_module)
        self._first, self._positions = trainer.global_step, pl_module.progress.positions
        self._start = self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        t, step, now = self.options, trainer.global_step, time.monotonic()
        if (batch_idx + 1) % t.accumulate or step % t.log_every:
            return
        progress = pl_module.progress
        means = progress.means()
        numbers = {
            "train/loss": means["loss"],
            **({"train/expected_tau": means["tau"]} if "tau" in means else {}),
            "train/learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "train/positions_per_second": (progress.positions - self._positions)
            / max(now - self._since, 1e-9),
            "train/tokens_seen": float(progress.tokens_seen),
        }
        self._positions, self._since = progress.positions, now
        left = (now - self._start) / max(step - self._first, 1) * (t.max_steps - step)
        if t.max_minutes is not None:
            left = min(left, max(0.0, 60 * t.max_minutes - progress.seconds))
        self._report(trainer, training_line(step, t.max_steps, numbers, left, self._of), numbers)

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        numbers = pl_module.validation_numbers
        line = validation_line(trainer.global_step, numbers)
        self._report(trainer, line, {f"validation/{k}": v for k, v in numbers.items()})
        self._positions, self._since = pl_module.progress.positions, time.monotonic()  # training's rate alone

    def _report(self, trainer: lightning.Trainer, line: str, numbers: dict[str, float]) -> None:
        if not self.quiet:
            say(line)
        for logger in trainer.loggers if trainer.is_global_zero else []:
            logger.log_metrics(numbers, trainer.global_step)
            logger.save()


class MilestoneCallback(Callback):
    """Saves the drafter, averaged where EMA is on, after the step in which it has seen so many text tokens.

    Args:
        milestones: text tokens. save: (steps taken, name of the folder) → writes `module.final_weights`; the main process calls it.
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
            pl_module.final_weights = {}  # those of the end are still to come


class StepTimes(Callback):
    """How long things take, in seconds, for a plan: `steps` as (seconds, rows that the target had not read before), the first
    step left out; `validation` of the last one, `saving` of what follows it."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.validation = self.saving = 0.0
        self.started = self.ended = 0.0
        self._seen: set[int] = set()
        self._fresh = self._since = self._validated = 0.0

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.monotonic()
        if batch_idx > 1:
            self.steps.append((now - self._since, int(self._fresh)))
        self.started = self.started or now
        self._since, self._fresh = now, len({*batch.keys} - self._seen)
        self._seen |= {*batch.keys}

    def on_validation_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.steps.append((time.monotonic() - self._since, int(self._fresh)))
        self._validated = time.monotonic()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.ended = time.monotonic()
        self.validation = self.ended - self._validated

    def on_train_end(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        self.saving = time.monotonic() - self.ended


class CheckpointCallback(Callback):
    """Saves and stops. A step that is validated is saved after it, so that going on from there repeats nothing.

    Args:
        recipe: trainer and output are read.
        settings: what a run that goes on from these checkpoints must have in common with this one.
    """

    def __init__(self, recipe: Recipe, settings: dict[str, str]) -> None:
        self.options, self.settings = recipe.trainer, settings
        self.folder = Path(recipe.output) / "checkpoints"
        self._handlers: dict[int, Any] = {}
        self._saved = -1

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        """From here on a signal asks for a stop after the step."""
        self._saved = trainer.global_step

        def remember(number: int, frame: object) -> None:
            pl_module.progress.stop_wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._handlers[number] = signal.signal(number, remember)
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
        """Nothing more belongs to this step. Raises Interrupted when a signal has come."""
        due = trainer.global_step % self.options.checkpoint_every == 0
        stopping = module.progress.stopping
        if due or trainer.should_stop or stopping:
            self._save(trainer, module)
        if stopping and not trainer.should_stop:
            raise Interrupted(
                f"stopped by a signal after step {trainer.global_step}; a checkpoint is saved and the same command goes on from it"
            )

    def _save(self, trainer: lightning.Trainer, module: DrafterModule) -> None:
        """One complete checkpoint of the present step; older ones beyond `keep_checkpoints` go."""
        step = trainer.global_step
        if step == self._saved:
            return
        path = checkpoints.place(self.folder, step)
        if trainer.is_global_zero:
            checkpoints.make_room(self.folder, self.options.keep_checkpoints)
        try:
            trainer.save_checkpoint(str(checkpoints.part(path)))
        except BaseException:  # a full disk: what is left of it is others'
            checkpoints.remove(checkpoints.part(path))
            raise
        trainer.strategy.barrier()  # every process has written its part
        if trainer.is_global_zero:
            config, vocab = module.drafter.config, module.drafter.draft_vocab
            record = {
                "step": step,
                "seconds": module.progress.seconds,
                "target_sha256": config.target_sha256,
                **self.settings,
                "schedule": module.schedule.record,
                "drafter": config.to_dict(),
                "draft_vocab": None if vocab is None else vocab.tolist(),
            }
            checkpoints.seal(path, record)
            checkpoints.prune(self.folder, self.options.keep_checkpoints)
        trainer.strategy.barrier()
        self._saved = step

    def teardown(self, trainer: lightning.Trainer, pl_module: Any, stage: str) -> None:
        """Signals do what they did before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
