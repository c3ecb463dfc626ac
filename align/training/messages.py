"""Notes before training, and the commands to run after it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from align.config.recipe import Recipe
from align.training.base_module import DrafterModule
from align.training.checkpoints import Checkpoint
from align.training.schedule import describe_change
from specalign.common.commands import command
from specalign.common.hub import DEFAULT_TARGET
from specalign.folder.chat import Chat


def list_notes(module: DrafterModule, resume: Checkpoint | None) -> list[str]:
    """Lines to print before training."""
    recipe, target = module.recipe, module.drafter.target
    notes = []
    if target.stepwise:
        notes.append(
            f"note: target {target.spec!r} updates its state token by token, so verifying drafts "
            "saves no time: no drafter "
            "speeds it up here"
        )
    if resume is None:
        if (
            recipe.drafter.kind == "ddit"
            and recipe.drafter.init is None
            and recipe.stage != "pretrain"
        ):
            notes.append("note: no drafter.init: this network starts from random weights")
        return notes
    steps = resume.seal.step
    if steps < recipe.trainer.max_steps:
        notes.append(f"resuming from {resume.path}")
    else:
        notes.append(
            f"{recipe.output} is finished ({steps} steps), nothing to train; "
            f"trainer.max_steps={2 * steps} continues it, "
            "trainer.resume=never starts over"
        )
    change = describe_change(module.schedule, resume.seal)
    return notes if change is None else [*notes, change]


def next_commands(recipe: Recipe, folder: Path, argv: Sequence[str]) -> str:
    """The commands to run with a saved drafter."""
    target = [] if recipe.target.name == DEFAULT_TARGET else ["--target", recipe.target.name]
    drafter = [
        "--drafter",
        str(folder),
        *Chat(recipe.data.template_kwargs, recipe.data.system).arguments,
    ]
    lines = [
        f"the drafter is in {folder}; next:",
        *_next_stage(recipe, folder, argv),
        f"  {command('decode.eval', '--suite', 'builtin', *target, *drafter)}",
        f'  {command("decode.generate", *target, *drafter)} "your prompt"',
    ]
    return "\n".join(lines)


def _next_stage(recipe: Recipe, folder: Path, argv: Sequence[str]) -> list[str]:
    """The command that trains the next stage on the same data, if there is one."""
    stage = {"pretrain": "finetune", "finetune": "calibrate"}.get(recipe.stage)
    if stage is None:
        return []
    arguments = [f"recipe={recipe.name}", f"stage={stage}", f"target.name={recipe.target.name}"]
    arguments += [f"drafter.init={folder}", f"data.path={recipe.data_folder}"]
    for argument in argv:  # the data are rejected where these keys differ
        if argument.startswith(("data.", "target.")) and not argument.startswith(
            ("data.path=", "target.name=")
        ):
            arguments.append(argument)
    arguments.append(f"output={recipe.output}-{stage}")
    return [f"  {command('align.train', *arguments)}"]
