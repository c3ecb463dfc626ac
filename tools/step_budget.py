"""What a training step costs on a GPU, counted without one: launches, host syncs, blocking uploads.

    python -m tools.step_budget                                             # a table of debug recipes
    python -m tools.step_budget recipe=debug_taps trainer.optimizer=muon    # one run, and what its last step did

Each step is counted from the end of the one before it, data loading and logging included; the table
has the most of any step after the warm-up. `shapes`: how many of them differ in shapes.
"""

import json
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from typing import Any

import lightning
from torch.utils._pytree import tree_leaves

from specalign.common.text import say
from tests import elsewhere
from tools.launches import OperatorCounter

RUNS = {
    "block": "recipe=debug_block",
    "block, kept rows": "recipe=debug_block trainer.keep_features_gb=1 trainer.batch_size=8",
    "block, Muon and EMA": "recipe=debug_block trainer.optimizer=muon trainer.ema=0.9",
    "variable prefix": "recipe=debug_variable_prefix",
    "autoregressive": "recipe=debug_autoregressive",
    "mdlm": "recipe=debug_mdlm",
}
SIZES = (
    "data.path={0}/data output={0}/run data.samples=48 data.batch_size=48 trainer.logger=[] "
    "trainer.log_every=100 trainer.validate_every=100 "
    "trainer.checkpoint_every=100 trainer.resume=never"
)
STEPS, WARM_UP = 9, 6
KINDS = ("launches", "syncs", "uploads", "asynchronous")


class StepCounter(OperatorCounter):
    """`steps`: the counts of each step, and a hash of the shapes of its operators' results."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[dict[str, int]] = []
        self.last: Counter[str] = Counter()
        self._shapes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = super().__torch_dispatch__(function, types, args, kwargs)
        shapes = tuple(tuple(x.shape) for x in tree_leaves(out) if self._is_there(x))
        if shapes:
            self._shapes = hash((self._shapes, str(function), shapes))
        return out

    def end_step(self) -> None:
        """Note what was counted since the last one."""
        self.steps.append({**{kind: getattr(self, kind) for kind in KINDS}, "shapes": self._shapes})
        self.last = self.places + self.operators
        self.places, self.operators = Counter(), Counter()
        self.launches = self.syncs = self.uploads = self.asynchronous = self._shapes = 0


class _Enough(Exception):
    """Ends the run: neither validation nor saving is counted."""


class _EndOfStep(lightning.Callback):
    def __init__(self, counter: StepCounter) -> None:
        self.counter = counter

    def on_train_batch_end(self, *given: Any) -> None:
        self.counter.end_step()
        if len(self.counter.steps) == STEPS:
            raise _Enough


def count_steps(words: str, folder: str) -> StepCounter:
    """Train a recipe on the pretended device."""
    from align import train

    counter, trainer = StepCounter(), lightning.Trainer

    def counting(**options: Any) -> Any:
        return trainer(**options | {"callbacks": [*options["callbacks"], _EndOfStep(counter)]})

    lightning.Trainer = counting  # type: ignore[assignment, misc]
    try:
        with suppress(_Enough), counter:
            train.main([*words.split(), *SIZES.format(folder).split()])
    finally:
        lightning.Trainer = trainer  # type: ignore[misc]
    return counter


def count_runs(runs: dict[str, str], folder: str) -> dict[str, dict[str, int]]:
    """The table, by name of the run."""
    found = {}
    for name, words in runs.items():
        counter = count_steps(words, folder)
        later = counter.steps[WARM_UP:]
        found[name] = {kind: max(step[kind] for step in later) for kind in KINDS}
        found[name]["shapes"] = len({step["shapes"] for step in later})
        if len(runs) == 1:
            say("\n".join(f"{n:4} {name}" for name, n in counter.last.most_common()), error=True)
    return found


def main() -> None:
    from align import synthesize

    words = " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        synthesize.main(["recipe=debug_block", *SIZES.format(folder).split()])  # on the CPU
        with elsewhere.pretend():
            found = count_runs({words: words} if words else RUNS, folder)
    say(json.dumps(found))


if __name__ == "__main__":
    main()
