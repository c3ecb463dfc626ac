"""One training run from its recipe to the saved drafter."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from align.common.errors import UserError
from align.common.hub import is_hub_id, local_path, nearby
from align.config.parser import shipped
from align.config.recipe import Recipe
from align.config.run_record import save_run_record
from align.data import shards as data
from align.data.draft_vocab import coverage
from align.data.packing import split_validation
from align.data.synthesis import check_data, data_folder, ensure
from align.models import causal as autoregressive
from align.models import standalone_checkpoint as standalone
from align.models.causal import CausalDrafter
from align.models.standalone import DiffusionDrafter
from align.target.loading import load_target
from align.training import checkpoints
from align.training.block_module import BlockDrafterModule
from align.training.build import _module, _save, build_drafter
from align.training.datamodule import RowsModule
from align.training.hardware import accelerator, main_process, target_device
from align.training.trainer import check_resume, fit


def train(recipe: Recipe, quiet: bool = False, argv: Sequence[str] | None = None) -> BlockDrafterModule:
    """Run a recipe to its end and save the drafter to <output>/drafter.

    Raises:
        UserError: input that does not fit. NonFiniteLoss, Interrupted: training stopped before its end.
    """
    # what is lacking is said before anything is loaded
    accelerator(recipe)
    _check_init(recipe)
    check_data(recipe)
    output, t = Path(recipe.output), recipe.target
    quiet = quiet or not main_process()
    target = load_target(
        t.name, t.dtype, target_device(recipe), revision=t.revision, trust_remote_code=t.trust_remote_code
    )
    # what can't be opened is said before the target writes for hours
    alone: DiffusionDrafter | CausalDrafter | None = None
    if recipe.drafter.kind == "autoregressive":
        alone = autoregressive.make(target, recipe.drafter)
    elif recipe.drafter.kind != "block":
        alone = standalone.make(target, recipe.drafter, recipe.seed)
    folder = ensure(recipe, target)
    manifest = data.read_manifest(folder)
    if manifest.get("target_sha256") != target.hash:
        raise UserError(
            f"{folder}: written by {manifest.get('target')!r} (another sha256), not by {t.name!r}; give another data.path"
        )
    training, validation = split_validation(data.read_samples(folder), recipe.data.validation_fraction)
    resume = checkpoints.newest(output / "checkpoints", recipe.trainer.resume, target.hash)
    vocabulary = None if resume is None else checkpoints.read_seal(resume)["draft_vocab"]
    drafter = alone or build_drafter(recipe, target, training, vocabulary)
    exact = manifest.get("top_p", 1.0) == 1.0 and not manifest.get("top_k", 0)
    rows = RowsModule(recipe, training, validation, drafter.config.block_size, exact)
    module = _module(drafter, recipe)
    if resume is not None:
        check_resume(recipe, drafter.config.to_dict(), resume)
    if main_process():
        save_run_record(recipe, output, argv)
    if not quiet:
        print(_data_line(folder, training, validation, recipe.data.samples), file=sys.stderr)
        if resume is not None:
            print(f"going on from {resume}", file=sys.stderr)
        elif recipe.drafter.kind == "ddit" and recipe.drafter.init is None and recipe.stage != "pretrain":
            print("note: no drafter.init: this network starts from nothing", file=sys.stderr)
    trainer = fit(recipe, module, rows, resume, quiet)
    if trainer.is_global_zero:
        if not quiet and trainer.global_step < recipe.trainer.max_steps:
            minutes, steps = recipe.trainer.max_minutes, recipe.trainer.max_steps
            print(f"trainer.max_minutes={minutes:g} ended it after {trainer.global_step} of {steps} steps")
        run = {"steps": trainer.global_step, "coverage": coverage(training, drafter.draft_vocab, target)}
        _save(recipe, module, manifest, run)
        if not quiet:
            print(_next(recipe, output / "drafter", argv or ()))
    return module


def _data_line(folder: Path, training: data.Samples, held_out: data.Samples, wanted: int) -> str:
    found = len(training) + len(held_out)
    line = f"training on {len(training)} samples ({len(training.tokens)} tokens) of {folder}, {len(held_out)} held out"
    if 2 * found < wanted:
        line += f"\nwarning: the recipe asks for {wanted} samples, {folder} has {found}"
    return line


def _check_init(recipe: Recipe) -> None:
    """Raises UserError for a drafter to begin with that is not there, with the recipe that makes it."""
    init = recipe.drafter.init
    if init is None or local_path(init).exists() or is_hub_id(init):
        return
    maker = Path(init).parent.name
    made = f"; python -m align.train recipe={maker} makes it" if maker in shipped() else nearby(Path(init))
    raise UserError(f"drafter.init={init!r}: no such folder{made}")


def _next(recipe: Recipe, folder: Path, argv: Sequence[str]) -> str:
    if recipe.drafter.kind == "ddit" and recipe.drafter.graph == "uniform":
        return f"the drafter is in {folder}; uniform noise has no one-step q, so decode can't use it (absorbing can)"
    target = "" if recipe.target.name == type(recipe.target)().name else f" --target {recipe.target.name}"
    return (
        f"the drafter is in {folder}; next:\n{_next_stage(recipe, folder, argv)}"
        f"  python -m decode.eval --suite builtin{target} --drafter {folder}\n"
        f'  python -m decode.generate{target} --drafter {folder} "your prompt"'
    )


def _next_stage(recipe: Recipe, folder: Path, argv: Sequence[str]) -> str:
    """The command that goes on from here, on the same data; none after the last stage."""
    stage = {"pretrain": "finetune", "finetune": "calibrate"}.get(recipe.stage)
    if stage is None:
        return ""
    words = [f"recipe={recipe.name}", f"stage={stage}", f"target.name={recipe.target.name}"]
    words += [f"drafter.init={folder}", f"data.path={data_folder(recipe)}"]
    same = ("data.", "target.")  # the data are taken for others where their keys differ
    words += [w for w in argv if w.startswith(same) and not w.startswith(("data.path=", "target.name="))]
    words += [f"output={recipe.output}-{stage}"]
    return f"  python -m align.train {shlex.join(words)}\n"
