"""When a run saves a checkpoint, and when it stops: at its last step, in time, or on a signal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align import checkpoints
from align.recipe import Recipe

if TYPE_CHECKING:
    from align.calibrate import Calibrate


class Interrupted(RuntimeError):
    """A signal asked training to stop; a checkpoint was saved."""


class Keeper:
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

    def started(self, step: int, module: Calibrate) -> None:
        """Training begins, or goes on, after `step` steps: signals are wishes from here on."""
        self._saved = step

        def remember(number: int, frame: object) -> None:
            module.stop_wanted = True

        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, remember)
            except ValueError:  # not the main thread
                return

    def step_taken(self, trainer: Any, module: Calibrate) -> None:
        """The weights have been updated; validation may follow."""
        step = trainer.global_step
        if step == self.options.max_steps or module.out_of_time():
            trainer.should_stop = True  # after a last validation
        elif step % self.options.validate_every:
            self.step_is_over(trainer, module)

    def step_is_over(self, trainer: Any, module: Calibrate) -> None:
        """Nothing more belongs to this step. Raises Interrupted when a signal has come."""
        due = trainer.global_step % self.options.checkpoint_every == 0
        if due or trainer.should_stop or module.stopping:
            self.save(trainer, module)
        if module.stopping and not trainer.should_stop:
            raise Interrupted(
                f"stopped by a signal after step {trainer.global_step}; a checkpoint is saved and the same command goes on from it"
            )

    def save(self, trainer: Any, module: Calibrate) -> None:
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
