"""What a training run says of itself, one line at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from align.recipe import Recipe

if TYPE_CHECKING:
    from align.calibrate import Calibrate


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


class Teller:
    """One line every `log_every` steps and one a validation; both are handed back as numbers for the loggers."""

    def __init__(self, recipe: Recipe, quiet: bool) -> None:
        self.trainer, self.quiet = recipe.trainer, quiet
        self._of = "token" if recipe.stage == "pretrain" else "block"
        self._first = self._positions = 0
        self._start = self._since = 0.0

    def started(self, step: int, module: Calibrate) -> None:
        """Training begins, or goes on, after `step` steps."""
        self._first, self._positions = step, module.positions
        self._start = self._since = time.monotonic()

    def step_taken(self, step: int, module: Calibrate) -> dict[str, float]:
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

    def validated(self, step: int, module: Calibrate) -> dict[str, float]:
        """The validation's numbers."""
        self._say(validation_line(step, module.validation_numbers))
        self._positions, self._since = module.positions, time.monotonic()  # the rate is training's alone
        return {f"validation/{k}": v for k, v in module.validation_numbers.items()}

    def _say(self, line: str) -> None:
        if not self.quiet:
            print(line, flush=True)
