"""What a run prints: notes before training, progress lines, and the commands to run after it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from align.config.recipe import Recipe
from align.training.base_module import DrafterModule
from align.training.checkpoints import Checkpoint
from specalign.common.commands import command
from specalign.common.hub import DEFAULT_TARGET
from specalign.common.text import clock
from specalign.folder.chat import Chat


def list_notes(module: DrafterModule, resume: Checkpoint | None) -> list[str]:
    """Lines to print before training."""
    recipe = module.recipe
    if resume is None:
        return []
    steps = resume.seal.step
    if steps < recipe.trainer.max_steps:
        return [f"resuming from {resume.path}"]
    return [
        f"{recipe.output} is finished ({steps} steps), nothing to train; "
        f"trainer.max_steps={2 * steps} continues it, trainer.resume=never starts over"
    ]


def training_line(
    step: int, steps: int, numbers: Mapping[str, float], seconds_left: float, unit: str = "block"
) -> str:
    """Means since the previous line; the loss is per `unit`."""
    tau = ""
    if "train/expected_tau" in numbers:
        tau = f"expected τ {numbers['train/expected_tau']:.3f}  "
    return (
        f"step {step}/{steps}  loss {numbers['train/loss']:.4f} a {unit}  {tau}"
        f"{numbers['train/positions_per_second']:.0f} positions/s  {clock(seconds_left)} left"
    )


def validation_line(step: int, numbers: Mapping[str, float]) -> str:
    """Expected τ with its standard error, acceptance at each position, and the share of drafts
    accepted up to it."""
    parts = [f"loss {numbers['loss']:.4f} a block"]
    if "bound" in numbers:
        parts.append(
            f"bound {numbers['bound']:.3f}±{numbers['bound_se']:.3f} nats a token "
            f"(perplexity {numbers['perplexity']:.0f})"
        )
    taus = []
    for name, temperature in (("greedy", 0), ("sampling", 1)):
        if f"tau_{name}" in numbers:
            taus.append(f"{numbers[f'tau_{name}']:.3f}±{numbers[f'tau_{name}_se']:.3f} {name}")
        else:
            taus.append(f"unknown {name} (no held-out text at temperature {temperature})")
    parts.append(f"expected τ {', '.join(taus)}")
    line = f"validation at step {step}: {', '.join(parts)}"
    lists = {
        "acceptance by position": "acceptance_",
        "accepted up to it": "kept_sampling_",
        "accepted up to it, greedy": "kept_greedy_",
    }
    for title, prefix in lists.items():
        values = [f"{v:.3f}" for k, v in numbers.items() if k.startswith(prefix)]
        if values:
            line += f"; {title} {' '.join(values)}"
    return line


def gain_line(before: Mapping[str, float], now: Mapping[str, float]) -> str | None:
    """Estimated τ on held-out text before and after training; None if it was not measured
    before."""
    parts = []
    for name in ("greedy", "sampling"):
        if f"tau_{name}" not in before or f"tau_{name}" not in now:
            continue
        first, last, error = before[f"tau_{name}"], now[f"tau_{name}"], now[f"tau_{name}_se"]
        clear = "" if abs(last - first) > 1.96 * error else ", within the error of these texts"
        parts.append(
            f"{name} {first:.2f} before, {last:.2f} ± {error:.2f} after "
            f"({last / first - 1:+.0%}{clear})"
        )
    return f"τ (estimated on held-out text): {'; '.join(parts)}" if parts else None


def next_commands(recipe: Recipe, folder: Path) -> str:
    """The commands to run with a saved drafter."""
    target = [] if recipe.target.name == DEFAULT_TARGET else ["--target", recipe.target.name]
    chat = Chat(recipe.data.template_kwargs, recipe.data.system)
    drafter = ["--drafter", str(folder), *chat.arguments]
    lines = [
        f"the drafter is in {folder}; next:",
        f"  {command('decode.eval', '--suite', 'builtin', *target, *drafter)}",
        f'  {command("decode.generate", *target, *drafter)} "your prompt"',
    ]
    return "\n".join(lines)
