"""A short trial on this machine: a few samples are generated and a few steps trained with the run's
own code, in a temporary folder. The whole run's time is scaled from it by counts."""

import copy
import time
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from align.config.hardware import target_device
from align.config.recipe import Recipe
from align.data.synthesis import synthesize
from align.training.base_module import Interrupted, NonFiniteLoss
from align.training.run import train
from specalign.common.errors import UserError
from specalign.lm.loading import load_target

SAMPLES = 32  # samples that a trial writes at most
STEPS = 6  # training steps of a trial


def run_pilot(recipe: Recipe) -> tuple[float, float]:
    """Generate and train a little of a recipe. Returns the seconds of a written sample and of a
    training step. Raises UserError: what the run itself would end with. KeyboardInterrupt: a
    signal."""
    with TemporaryDirectory(prefix="specalign-plan-", ignore_cleanup_errors=True) as folder:
        small = _shrink(recipe, Path(folder))
        target = load_target(small.target.name, device=target_device(small), **small.target_options)
        start = time.monotonic()
        synthesize(small, target, small.data_folder, quiet=True)
        sample = (time.monotonic() - start) / small.data.samples
        del target
        try:
            seconds = train(small, quiet=True).progress.seconds
        except Interrupted:
            raise KeyboardInterrupt from None
        except NonFiniteLoss as error:
            raise UserError(f"trial run failed: {error}") from None
        return sample, seconds / STEPS


def _shrink(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe on one device and a few samples, without what only the whole run needs."""
    small = copy.deepcopy(recipe)
    data, trainer, launch = small.data, small.trainer, small.launch
    small.output = str(folder / "run")
    small.target.parallel = "replicate"
    data.path = str(folder / "data")
    data.samples = data.batch_size = min(SAMPLES, max(4, data.batch_size))
    data.writer = trainer.features_writer = "target"  # a server is not asked for a trial
    data.text = []
    trainer.batch_size //= recipe.processes
    trainer.max_steps = trainer.validate_every = trainer.checkpoint_every = STEPS
    trainer.warmup_steps = min(trainer.warmup_steps, STEPS)
    trainer.validation_rows = min(2, trainer.validation_rows)
    trainer.keep_features_gb = trainer.features_gb = 0.0
    trainer.logger = []
    trainer.milestones = []
    trainer.validate_first = False
    trainer.max_minutes = None
    launch.devices = launch.num_nodes = 1
    launch.strategy = "auto"
    return small


def scale_seconds(recipe: Recipe, written: int, sample: float, step: float) -> dict[str, float]:
    """The whole run's seconds by stage, without starting and saving. written: samples that are
    there. A validation row counts as a row of a step; stored outputs of the target make training
    faster than this."""
    trainer = recipe.trainer
    validations = ceil(trainer.max_steps / trainer.validate_every) + trainer.validate_first
    rows = trainer.max_steps + validations * trainer.validation_rows / trainer.batch_size
    training = rows * step
    if trainer.max_minutes is not None:
        training = min(training, 60 * trainer.max_minutes)
    writing = max(0, recipe.data.samples - written) * sample
    return {"writing": writing, "training": training}
