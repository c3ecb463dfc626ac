"""How each kind of drafter is created, trained and saved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from align.config.drafter import DrafterConfig
from align.config.recipe import Recipe
from align.data.draft_vocab import frequent_tokens
from align.data.supply import Supply
from align.makers.block import block_config, make_block
from align.makers.standalone import make_causal, make_standalone
from align.training.base_module import Drafter, DrafterModule
from align.training.block_module import BlockDrafterModule, CausalDrafterModule
from align.training.checkpoints import Checkpoint
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.model_card import write_card
from specalign.common.checksums import CHECKSUMS, write_checksums
from specalign.folder.chat import Chat
from specalign.folder.trained_chat import save_chat
from specalign.formats.block import load_drafter, save_drafter
from specalign.formats.causal import save_causal
from specalign.formats.standalone import save_standalone
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.causal import CausalDrafter

MODULES: dict[str, type[DrafterModule]] = {
    "block": BlockDrafterModule,
    "ddit": DiffusionDrafterModule,
    "masked_lm": DiffusionDrafterModule,
    "autoregressive": CausalDrafterModule,
}
"""By `drafter.kind`."""


def make_drafter(
    target: Target, options: DrafterConfig, vocab: Tensor | None, seed: int
) -> Drafter:
    """The drafter to train; `vocab`: from `draft_vocab`."""
    if options.kind == "block":
        return make_block(target, options, vocab, seed)
    if options.kind == "autoregressive":
        return make_causal(target, options)
    return make_standalone(target, options, seed)


def draft_vocab(
    recipe: Recipe, target: Target, supply: Supply, resume: Checkpoint | None
) -> Tensor | None:
    """The token ids that a drafter may propose, ascending; None = all. A resumed run uses its
    checkpoint's: more data may have changed the frequencies."""
    if resume is None or resume.seal.draft_vocab is None:
        return frequent_tokens(supply.training, target, recipe.drafter.draft_vocab, supply.text)
    return torch.tensor(resume.seal.draft_vocab)


def conditioning(options: DrafterConfig, target: Target) -> BlockConfig | None:
    """The target outputs that the recipe's drafter reads, besides p; None = nothing."""
    if options.kind != "block":
        return None
    if options.init is not None:
        return load_drafter(options.init, target).config
    return block_config(target, options, None)


def save_trained(module: DrafterModule, supply: Supply, steps: int, name: str = "drafter") -> Path:
    """Write the drafter and its card to <output>/NAME; returns the folder."""
    recipe, drafter = module.recipe, module.drafter
    folder = Path(recipe.output) / name
    card = write_card(module, supply, steps)
    (folder / CHECKSUMS).unlink(missing_ok=True)  # until the new weights are complete
    if isinstance(drafter, BlockDrafter):
        _save_block(drafter, recipe, module.final_weights, folder, card)
    elif isinstance(drafter, CausalDrafter):
        save_causal(drafter, folder, module.final_weights, card)
    else:
        fresh = make_standalone(drafter.target, recipe.drafter, recipe.seed)
        _set_weights(fresh, module.final_weights)
        save_standalone(fresh, folder, card)
    save_chat(folder, Chat(recipe.data.template_kwargs, recipe.data.system))
    write_checksums(folder)
    return folder


def _save_block(
    drafter: BlockDrafter, recipe: Recipe, weights: dict[str, Tensor], folder: Path, card: str
) -> None:
    config = drafter.config
    decay = recipe.objective.prefix_decay
    if decay:  # decoding recognises D²SD's second drafter by it
        config = replace(config, extra={**config.extra, "prefix_decay": decay})
    vocab = None if drafter.draft_vocab is None else drafter.draft_vocab.cpu()
    head = None if drafter.head is None else drafter.head.cpu()
    fresh = BlockDrafter(config, drafter.target, vocab, head)
    _set_weights(fresh, weights)
    save_drafter(fresh, folder, card)


@torch.no_grad()
def _set_weights(fresh: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy trained weights into a new drafter, whose own may be sharded like the target's that it
    was made from."""
    for name, parameter in [*fresh.named_parameters()]:
        if isinstance(parameter, DTensor):
            module, _, last = name.rpartition(".")
            whole = nn.Parameter(weights[name].to(parameter.dtype))
            setattr(fresh.get_submodule(module), last, whole)
        else:
            parameter.copy_(weights[name])
