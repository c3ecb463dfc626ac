"""What a training run says of itself, one line at a time."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning
from lightning.pytorch.callbacks import Callback

from align.config.recipe import Recipe
from align.training import checkpoints
from align.training.block_module import BlockDrafterModule
from align.training.loggers import CSVFile

if TYPE_CHECKING:
    from align.training.block_module import BlockDrafterModule

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from align.training.block_module import BlockDrafterModule


def clock(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def training_line(step: int, steps: int, numbers: Mapping[str, float], left: float, of: str = "block") -> str:
    """`step 20/100  loss …`: means since the line before, what the loss is `of`, and the time left in seconds."""
    tau = f"expected τ {numbers['train/expected_tau']:.3f}  " if "train/expected_tau" in numbers else ""
    return (
        f"step {step}/{steps}  loss {numbers['train/loss']:.4f} a {of}  {tau}"
        f"{numbers['train/positions_per_second']:.0f} positions/s  {clock(left)} left"
    )


def validation_line(step: int, numbers: Mapping[str, float]) -> str:
    """Expected τ with its standard error, greedy and sampling, the acceptance at each position, and the share of drafts kept
    so far."""

    def tau(name: str, needs: str) -> str:
        if f"tau_{name}" not in numbers:
            return f"unknown {name} (no held-out text {needs})"
        return f"{numbers[f'tau_{name}']:.3f}±{numbers[f'tau_{name}_se']:.3f} {name}"

    def by_position(name: str) -> str:
        return " ".join(f"{v:.3f}" for k, v in numbers.items() if k.startswith(name))

    each = by_position("acceptance_")
    kept = by_position("kept_sampling_") or by_position("kept_greedy_")
    bound = ""
    if "bound" in numbers:
        bound = f"bound {numbers['bound']:.3f}±{numbers['bound_se']:.3f} nats a token (perplexity {numbers['perplexity']:.0f}), "
    return (
        f"validation at step {step}: loss {numbers['loss']:.4f} a block, {bound}expected τ {tau('greedy', 'at temperature 0')}, "
        f"{tau('sampling', 'at temperature 1')}; acceptance by position {each}"
        + (f"; kept as far as there {kept}" if kept else "")
    )


class ProgressLogger:
    """One line every `log_every` steps and one a validation; both are handed back as numbers for the loggers."""

    def __init__(self, recipe: Recipe, quiet: bool) -> None:
        self.trainer, self.quiet = recipe.trainer, quiet
        self._of = "token" if recipe.stage == "pretrain" else "block"
        self._first = self._positions = 0
        self._start = self._since = 0.0

    def started(self, step: int, module: BlockDrafterModule) -> None:
        """Training begins, or goes on, after `step` steps."""
        self._first, self._positions = step, module.positions
        self._start = self._since = time.monotonic()

    def step_taken(self, step: int, module: BlockDrafterModule) -> dict[str, float]:
        """The numbers of this step, means since the last ones; none between lines."""
        t, now = self.trainer, time.monotonic()
        if step % t.log_every:
            return {}
        means = module.means()
        numbers = {
            "train/loss": means["loss"],
            **({"train/expected_tau": means["tau"]} if "tau" in means else {}),
            "train/learning_rate": module.rate,
            "train/positions_per_second": (module.positions - self._positions) / max(now - self._since, 1e-9),
            "train/tokens_seen": float(module.tokens_seen),
        }
        self._positions, self._since = module.positions, now
        left = (now - self._start) / max(step - self._first, 1) * (t.max_steps - step)
        if t.max_minutes is not None:
            left = min(left, max(0.0, 60 * t.max_minutes - module.seconds))
        self._say(training_line(step, t.max_steps, numbers, left, self._of))
        return numbers

    def validated(self, step: int, module: BlockDrafterModule) -> dict[str, float]:
        """The validation's numbers."""
        self._say(validation_line(step, module.validation_numbers))
        self._positions, self._since = module.positions, time.monotonic()  # the rate is training's alone
        return {f"validation/{k}": v for k, v in module.validation_numbers.items()}

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)


class Interrupted(RuntimeError):
    """A signal asked training to stop; a checkpoint was saved."""


class CheckpointCallback:
    """Saves and stops. A step that is validated is saved after it, so that going on from there repeats nothing.

    Args:
        recipe: trainer and output are read.
        settings: what a run that goes on from these checkpoints must have in common with this one.
    """

    def __init__(self, recipe: Recipe, settings: dict[str, str]) -> None:
        self.options, self.settings = recipe.trainer, settings
        self.folder = Path(recipe.output) / "checkpoints"
        self._before: dict[int, Any] = {}
        self._saved = -1

    def started(self, step: int, module: BlockDrafterModule) -> None:
        """Training begins, or goes on, after `step` steps: signals are wishes from here on."""
        self._saved = step

        def remember(number: int, frame: object) -> None:
            module.stop_wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, remember)
            except ValueError:  # not the main thread
                return

    def step_taken(self, trainer: Any, module: BlockDrafterModule) -> None:
        """The weights have been updated; validation may follow."""
        step = trainer.global_step
        if step == self.options.max_steps or module.out_of_time():
            trainer.should_stop = True  # after a last validation
        elif step % self.options.validate_every:
            self.step_is_over(trainer, module)

    def step_is_over(self, trainer: Any, module: BlockDrafterModule) -> None:
        """Nothing more belongs to this step. Raises Interrupted when a signal has come."""
        due = trainer.global_step % self.options.checkpoint_every == 0
        if due or trainer.should_stop or module.stopping:
            self.save(trainer, module)
        if module.stopping and not trainer.should_stop:
            raise Interrupted(
                f"stopped by a signal after step {trainer.global_step}; a checkpoint is saved and the same command goes on from it"
            )

    def save(self, trainer: Any, module: BlockDrafterModule) -> None:
        """One complete checkpoint of the present step; older ones beyond `keep_checkpoints` go."""
        step = trainer.global_step
        if step == self._saved:
            return
        path = checkpoints.place(self.folder, step)
        trainer.save_checkpoint(str(checkpoints.part(path)))
        trainer.strategy.barrier()  # every process has written its part
        if trainer.is_global_zero:
            config, vocab = module.drafter.config, module.drafter.draft_vocab
            record = {
                "step": step,
                "seconds": module.seconds,
                "target_sha256": config.target_sha256,
                **self.settings,
                "drafter": config.to_dict(),
                "draft_vocab": None if vocab is None else vocab.tolist(),
            }
            checkpoints.seal(path, record)
            checkpoints.prune(self.folder, self.options.keep_checkpoints)
        trainer.strategy.barrier()
        self._saved = step

    def ended(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class Reports(Callback):
    """What is done after every step and every validation: tell first, then keep, so that a checkpoint's window is told."""

    def __init__(
        self, teller: ProgressLogger, keeper: CheckpointCallback, accumulate: int, validate_first: bool
    ) -> None:
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
