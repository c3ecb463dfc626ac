"""`python -m align.train recipe=NAME …`: calibrate a drafter towards its target on target-written data."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align import checkpoints, data
from align.calibrate import Calibrate, NonFiniteLoss
from align.card import write_card
from align.datamodule import RowsModule
from align.drafters import autoregressive, standalone
from align.drafters.autoregressive import CausalDrafter, save_causal
from align.drafters.block import BlockDrafter
from align.drafters.block_config import BlockConfig
from align.drafters.checkpoint import (
    coverage,
    frequent_tokens,
    from_target,
    load_drafter,
    save_drafter,
    with_confidence,
    without_confidence,
)
from align.drafters.diffusion import DiffusionDrafter
from align.drafters.standalone import save_standalone
from align.errors import UserError, cli
from align.hub import is_hub_id, nearby
from align.imitate import Imitate
from align.keeper import Interrupted
from align.launch import check_resume, fit
from align.machine import accelerator, main_process, target_device
from align.pretrain import Pretrain
from align.recipe import Recipe
from align.recipe_reader import parse_command, shipped
from align.run_record import save_run_record
from align.synthesize import check_data, data_folder, ensure
from align.target import Target, load_target


def build_drafter(
    recipe: Recipe, target: Target, samples: data.Samples, vocabulary: Sequence[int] | None = None
) -> BlockDrafter:
    """The block drafter to train: `drafter.init` as it was saved, with a confidence head where one is asked for, or a fresh
    one after the recipe.

    `vocabulary` is the draft vocabulary of a run that goes on: its data may have grown, and with it what is frequent.
    """
    if recipe.drafter.init is not None:
        drafter = load_drafter(recipe.drafter.init, target)
        if recipe.drafter.confidence_head:
            drafter = with_confidence(drafter)
        elif drafter.confidence is not None:
            print(
                "drafter.init: its confidence head is left out (drafter.confidence_head=true keeps it)",
                file=sys.stderr,
            )
            drafter = without_confidence(drafter)
        # the same weights in another dtype are another target, and what is learnt here is this one
        drafter.config = replace(drafter.config, target=target.spec, target_sha256=target.hash)
    else:
        size = recipe.drafter.draft_vocab
        chosen = frequent_tokens(samples, target, size) if vocabulary is None else torch.tensor(vocabulary)
        drafter = from_target(target, recipe.drafter, chosen, recipe.seed)
    if recipe.drafter.train == "confidence_head":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("confidence."))
    return drafter


def train(recipe: Recipe, quiet: bool = False, argv: Sequence[str] | None = None) -> Calibrate:
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
    training, validation = data.split_validation(data.read_samples(folder), recipe.data.validation_fraction)
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


def _module(drafter: BlockDrafter | DiffusionDrafter | CausalDrafter, recipe: Recipe) -> Calibrate:
    if isinstance(drafter, BlockDrafter):
        return Calibrate(drafter, recipe)
    return Imitate(drafter, recipe) if isinstance(drafter, CausalDrafter) else Pretrain(drafter, recipe)


def _save(recipe: Recipe, module: Calibrate, manifest: dict[str, Any], run: dict[str, Any]) -> None:
    """<output>/drafter, with a card written from the run."""
    run |= {
        "tokens_seen": module.tokens_seen,
        "positions": module.positions,
        "minutes": module.seconds / 60,
        "parameters": sum(w.numel() for w in module.final_weights.values()),
    }
    folder, numbers = Path(recipe.output) / "drafter", module.validation_numbers
    if isinstance(module.drafter, BlockDrafter):
        config = module.drafter.config
        if decay := recipe.objective.prefix_decay:  # decode knows D²SD's second drafter by it
            config = replace(config, extra={**config.extra, "prefix_decay": decay})
        trained = _with_weights(module.drafter, module.final_weights, config)
        save_drafter(trained, folder, write_card(recipe, trained.config, manifest, run, numbers))
    elif isinstance(module.drafter, CausalDrafter):
        card = write_card(recipe, module.drafter.config, manifest, run, numbers)
        save_causal(module.drafter, folder, module.final_weights, card)
    else:
        fresh = standalone.make(module.drafter.target, recipe.drafter, recipe.seed)
        alone = standalone.with_weights(fresh, module.final_weights)
        save_standalone(alone, folder, write_card(recipe, alone.config, manifest, run, numbers))


@torch.no_grad()
def _with_weights(drafter: BlockDrafter, weights: dict[str, Tensor], config: BlockConfig) -> BlockDrafter:
    """A drafter of the same make: a strategy may have taken the trained one's own weights apart. `config`: the same, but for
    what it says of its training."""
    vocab = None if drafter.draft_vocab is None else drafter.draft_vocab.cpu()
    copy = BlockDrafter(config, drafter.target, vocab)
    for name, parameter in copy.named_parameters():
        parameter.copy_(weights[name])
    return copy


def _check_init(recipe: Recipe) -> None:
    """Raises UserError for a drafter to begin with that is not there, with the recipe that makes it."""
    init = recipe.drafter.init
    if init is None or Path(init).expanduser().exists() or is_hub_id(init):
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


@cli
def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    recipe = parse_command(words, "align.train", __doc__ or "")
    try:
        train(recipe, argv=words)
    except (NonFiniteLoss, Interrupted) as stop:
        if (
            not main_process()
        ):  # a worker that has stopped with the others: its launcher must not take it for a crash
            raise SystemExit(0) from None
        failed = isinstance(stop, NonFiniteLoss)
        print(f"error: {stop}" if failed else str(stop), file=sys.stderr)
        raise SystemExit(1 if failed else 130) from None


if __name__ == "__main__":
    main()
