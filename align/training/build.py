"""What is trained: the drafter that a recipe asks for, its Lightning module, and how it is saved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from align.config.recipe import Recipe
from align.data import shards as data
from align.data.draft_vocab import frequent_tokens
from align.models import standalone_checkpoint as standalone
from align.models.block import BlockDrafter
from align.models.block_checkpoint import (
    from_target,
    load_drafter,
    save_drafter,
    with_confidence,
    without_confidence,
)
from align.models.block_config import BlockConfig
from align.models.causal import CausalDrafter, save_causal
from align.models.standalone import DiffusionDrafter
from align.models.standalone_checkpoint import save_standalone
from align.target.model import Target
from align.training.block_module import BlockDrafterModule
from align.training.causal_module import CausalDrafterModule
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.model_card import write_card


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


def _module(drafter: BlockDrafter | DiffusionDrafter | CausalDrafter, recipe: Recipe) -> BlockDrafterModule:
    if isinstance(drafter, BlockDrafter):
        return BlockDrafterModule(drafter, recipe)
    return (
        CausalDrafterModule(drafter, recipe)
        if isinstance(drafter, CausalDrafter)
        else DiffusionDrafterModule(drafter, recipe)
    )


def _save(recipe: Recipe, module: BlockDrafterModule, manifest: dict[str, Any], run: dict[str, Any]) -> None:
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
