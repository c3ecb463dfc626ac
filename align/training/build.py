"""What is trained, by `drafter.kind`: how it is made, which module trains it, how it is saved and what its card says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from align.common.checksums import CHECKSUMS, write_checksums
from align.common.errors import UserError
from align.config.recipe import Recipe
from align.data.draft_vocab import coverage, frequent_tokens
from align.data.supply import Supply
from align.folder.chat import Chat
from align.folder.trained_chat import save_chat
from align.makers.block import block_config, make_block
from align.makers.causal import make_causal
from align.makers.choices import lora_alpha
from align.makers.standalone import make_standalone
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.block_parts import merge_low_rank, with_low_rank
from align.models.checkpoints.block import load_drafter, save_drafter
from align.models.checkpoints.causal import save_causal
from align.models.checkpoints.standalone import save_standalone
from align.models.standalone import DiffusionDrafter
from align.target.model import Target
from align.training import checkpoints
from align.training.base_module import Drafter, DrafterModule
from align.training.block_module import BlockDrafterModule
from align.training.causal_module import CausalDrafterModule
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.model_card import About, about_block, about_causal, about_standalone, write_card


@dataclass(frozen=True)
class Kind:
    """One kind of drafter.

    make: (target, recipe, draft vocabulary) → the drafter to train. module: what trains it. save: (drafter, recipe, final
    weights, folder, card). about: what its card says of it. chosen_vocabulary: it drafts over the tokens that the data use
    most, so the data come first.
    """

    make: Callable[[Target, Recipe, Tensor | None], Drafter]
    module: type[DrafterModule]
    save: Callable[[Any, Recipe, dict[str, Tensor], Path, str], None]
    about: Callable[[Recipe, Any, float], About]
    chosen_vocabulary: bool = False


def draft_vocab(recipe: Recipe, target: Target, supply: Supply, resume: Path | None) -> Tensor | None:
    """The token ids that a drafter may propose, ascending; None = all.

    That of the checkpoint which a run goes on from: its data may have grown, and with it what is frequent.
    """
    before = None if resume is None else checkpoints.read_seal(resume)["draft_vocab"]
    if before is not None:
        if not all(a < b for a, b in pairwise([-1, *before, target.vocab_size])):
            raise UserError(f"{resume}: its draft_vocab is no list of the target's tokens in ascending order")
        return torch.tensor(before)
    return frequent_tokens(supply.training, target, recipe.drafter.draft_vocab, supply.text)


def conditioning(recipe: Recipe, target: Target) -> BlockConfig | None:
    """What the recipe's drafter is shown of the target besides p; None = nothing."""
    options = recipe.drafter
    if options.kind != "block":
        return None
    if options.init is not None:
        return load_drafter(options.init, target).config
    return block_config(target, options, None)


def save_trained(module: DrafterModule, supply: Supply, steps: int, name: str = "drafter") -> Path:
    """Write <output>/NAME with a card made from the run; returns the folder. `supply`: what it trained on."""
    recipe, drafter, progress = module.recipe, module.drafter, module.progress
    kind, folder = KINDS[recipe.drafter.kind], Path(recipe.output) / name
    trained = module.trained()
    run = {
        "steps": steps,
        "tokens_seen": progress.tokens_seen,
        "positions": progress.positions,
        "minutes": progress.seconds / 60,
        "parameters": sum(w.numel() for name, w in module.final_weights.items() if name in trained),
    }
    about = kind.about(recipe, drafter.config, coverage(supply.training, drafter.draft_vocab, drafter.target))
    card = write_card(
        recipe, about, drafter.config, supply.manifest, run, module.validation_numbers, supply.text_manifest
    )
    (folder / CHECKSUMS).unlink(missing_ok=True)  # those of other weights, till these are whole
    kind.save(drafter, recipe, module.final_weights, folder, card)
    save_chat(folder, Chat(recipe.data.template_kwargs, recipe.data.system))
    write_checksums(folder)
    return folder


def _save_block(
    drafter: BlockDrafter, recipe: Recipe, weights: dict[str, Tensor], folder: Path, card: str
) -> None:
    config = drafter.config
    if decay := recipe.objective.prefix_decay:  # decode knows D²SD's second drafter by it
        config = replace(config, extra={**config.extra, "prefix_decay": decay})
    vocab = None if drafter.draft_vocab is None else drafter.draft_vocab.cpu()
    head = None if drafter.head is None else drafter.head.cpu()
    fresh = BlockDrafter(config, drafter.target, vocab, head)
    options = recipe.drafter
    if options.lora_rank:
        with_low_rank(fresh, options.lora_rank, lora_alpha(options), options.lora_targets, recipe.seed)
    _set_weights(fresh, weights)
    merge_low_rank(fresh)
    save_drafter(fresh, folder, card)


def _save_standalone(
    drafter: DiffusionDrafter, recipe: Recipe, weights: dict[str, Tensor], folder: Path, card: str
) -> None:
    fresh = make_standalone(drafter.target, recipe.drafter, recipe.seed)
    _set_weights(fresh, weights)
    save_standalone(fresh, folder, card)


@torch.no_grad()
def _set_weights(fresh: nn.Module, weights: dict[str, Tensor]) -> None:
    """Give a new drafter the trained weights: a strategy may have taken the trained one's own apart, and the target that the new one
    was made from."""
    for name, parameter in [*fresh.named_parameters()]:
        if isinstance(parameter, DTensor):
            where, _, last = name.rpartition(".")
            setattr(fresh.get_submodule(where), last, nn.Parameter(weights[name].to(parameter.dtype)))
        else:
            parameter.copy_(weights[name])


STANDALONE = Kind(
    lambda target, recipe, _: make_standalone(target, recipe.drafter, recipe.seed),
    DiffusionDrafterModule,
    _save_standalone,
    about_standalone,
)
KINDS = {
    "block": Kind(
        lambda target, recipe, vocab: make_block(target, recipe.drafter, vocab, recipe.seed),
        BlockDrafterModule,
        _save_block,
        about_block,
        chosen_vocabulary=True,
    ),
    "ddit": STANDALONE,
    "masked_lm": STANDALONE,
    "autoregressive": Kind(
        lambda target, recipe, _: make_causal(target, recipe.drafter),
        CausalDrafterModule,
        lambda drafter, _, weights, folder, card: save_causal(drafter, folder, weights, card),
        about_causal,
    ),
}
"""By `drafter.kind`."""
