"""`python -m align.train recipe=NAME …`: calibrate a drafter towards its target on target-written data."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from align import data
from align.calibrate import Calibrate, NonFiniteLoss
from align.card import write_card
from align.datamodule import RowsModule
from align.drafters.block import BlockDrafter
from align.drafters.checkpoint import coverage, frequent_tokens, from_target, load_drafter, save_drafter
from align.errors import UserError, cli
from align.launch import Interrupted, fit
from align.recipe import Recipe
from align.recipe_reader import parse_command
from align.run_record import save_run_record
from align.synthesize import ensure
from align.target import Target, load_target


def build_drafter(recipe: Recipe, target: Target, samples: data.Samples) -> BlockDrafter:
    """The drafter to train: `drafter.init` as it was saved, or a fresh one after the recipe."""
    if recipe.drafter.init is not None:
        return load_drafter(recipe.drafter.init, target)
    return from_target(
        target, recipe.drafter, frequent_tokens(samples, target, recipe.drafter.draft_vocab), recipe.seed
    )


def train(recipe: Recipe, quiet: bool = False) -> Calibrate:
    """Run a recipe to its end and save the drafter to <output>/drafter.

    Raises:
        UserError: input that does not fit. NonFiniteLoss, Interrupted: training stopped before its end.
    """
    started = time.monotonic()
    output = Path(recipe.output)
    t = recipe.target
    target = load_target(
        t.name, t.dtype, t.device, revision=t.revision, trust_remote_code=t.trust_remote_code
    )
    folder = ensure(recipe, target)
    manifest = data.read_manifest(folder)
    if manifest["target_sha256"] != target.hash:
        raise UserError(
            f"{folder}: written by {manifest['target']!r} (another sha256), not by {t.name!r}; give another data.path"
        )
    save_run_record(recipe, output)
    samples = data.read_samples(folder)
    training, validation = data.split_validation(samples, recipe.data.validation_fraction, recipe.seed)
    drafter = build_drafter(recipe, target, training)
    module = Calibrate(drafter, recipe)
    rows = RowsModule(recipe, training, validation, drafter.config.block_size)
    trainer = fit(recipe, module, rows, quiet)
    if module.validation_numbers == {} or trainer.global_step % recipe.trainer.validate_every:
        trainer.validate(module, rows, verbose=False)
    if trainer.is_global_zero:
        run = {
            "steps": trainer.global_step,
            "tokens_seen": module.tokens_seen,
            "positions": module.positions,
            "minutes": (time.monotonic() - started) / 60,
            "parameters": sum(p.numel() for p in drafter.parameters()),
        }
        share = coverage(training, drafter.draft_vocab, target)
        with module.ema.applied(drafter):
            card = write_card(recipe, drafter.config, manifest, run, module.validation_numbers, share)
            save_drafter(drafter, output / "drafter", card)
        if not quiet:
            print(
                f"the drafter is in {output / 'drafter'}; next:\n  python -m decode.eval --suite builtin --drafter {output / 'drafter'}"
            )
    return module


@cli
def main(argv: list[str] | None = None) -> None:
    recipe = parse_command(sys.argv[1:] if argv is None else argv, "align.train", __doc__ or "")
    torch.set_float32_matmul_precision("high")
    try:
        train(recipe)
    except (NonFiniteLoss, Interrupted) as stop:
        print(f"error: {stop}" if isinstance(stop, NonFiniteLoss) else str(stop), file=sys.stderr)
        raise SystemExit(1 if isinstance(stop, NonFiniteLoss) else 130) from None


if __name__ == "__main__":
    main()
