"""How each kind of drafter is created, trained, and saved with a model card."""

import shlex
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from align.config.drafter import DrafterConfig
from align.config.recipe import Recipe
from align.data.draft_vocab import coverage, frequent_tokens
from align.data.supply import Supply
from align.makers.block import block_config, make_block
from align.makers.standalone import make_causal, make_standalone
from align.training.base_module import Drafter, DrafterModule
from align.training.block_module import BlockDrafterModule, CausalDrafterModule
from align.training.checkpoints import Checkpoint
from align.training.diffusion_module import DiffusionDrafterModule
from align.training.metrics import KINDS
from specalign.common.checksums import CHECKSUMS, write_checksums
from specalign.common.files import write_text
from specalign.common.hub import DEFAULT_TARGET, card_metadata, hub_id, opening_name
from specalign.common.pages import render_page
from specalign.common.provenance import training_versions
from specalign.folder.chat import Chat
from specalign.folder.training_record import ExpectedTau, TrainingRecord, save_record
from specalign.formats.block import load_drafter, save_drafter
from specalign.formats.standalone import save_causal, save_standalone
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
_LIBRARIES = {"block": "block-drafter", "autoregressive": "transformers"}


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
    record = describe_training(module, supply)
    (folder / CHECKSUMS).unlink(missing_ok=True)  # until the new weights are complete
    if isinstance(drafter, BlockDrafter):
        _save_block(drafter, recipe, module.final_weights, folder)
    elif isinstance(drafter, CausalDrafter):
        save_causal(drafter, folder, module.final_weights)
    else:
        fresh = make_standalone(drafter.target, recipe.drafter, recipe.seed)
        _set_weights(fresh, module.final_weights)
        save_standalone(fresh, folder)
    write_text(folder / "README.md", write_card(module, supply, steps, record))
    save_record(folder, Chat(recipe.data.template_kwargs, recipe.data.system), record)
    write_checksums(folder)
    return folder


def _save_block(
    drafter: BlockDrafter, recipe: Recipe, weights: dict[str, Tensor], folder: Path
) -> None:
    config = drafter.config
    decay = recipe.objective.prefix_decay
    if decay:  # decoding recognises D²SD's second drafter by it
        config = replace(config, extra={**config.extra, "prefix_decay": decay})
    vocab = None if drafter.draft_vocab is None else drafter.draft_vocab.cpu()
    head = None if drafter.head is None else drafter.head.cpu()
    fresh = BlockDrafter(config, drafter.target, vocab, head)
    _set_weights(fresh, weights)
    save_drafter(fresh, folder)


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


def describe_training(module: DrafterModule, supply: Supply) -> TrainingRecord:
    """The data, and expected τ of the last validation."""
    numbers, data, text = module.validation_numbers, supply.manifest, supply.text_manifest or {}
    prompts = data.get("prompts")
    return TrainingRecord(
        draft_tokens=module.drafter.config.block_size,
        expected_tau={
            kind: ExpectedTau(
                numbers[f"tau_{kind}"], numbers[f"tau_{kind}_se"], int(numbers[f"anchors_{kind}"])
            )
            for kind in KINDS
            if f"tau_{kind}" in numbers
        },
        samples=data["samples"],
        tokens=data["tokens"],
        prompts=None if prompts is None else _name(prompts),
        text=[_name(source["source"]) for source in text.get("sources", ())],
        removed={_name(name): count for name, count in text.get("removed", {}).items()},
    )


def write_card(module: DrafterModule, supply: Supply, steps: int, record: TrainingRecord) -> str:
    """Markdown with hub metadata: settings, data, and the last validation with standard errors.
    `module.final_weights` are those after `steps` steps."""
    recipe, config = module.recipe, module.drafter.config
    kind, init = recipe.drafter.kind, recipe.drafter.init
    tags = ["speculative-decoding", "discrete-diffusion", "drafter"]
    if kind == "autoregressive":
        tags.remove("discrete-diffusion")
    library = _LIBRARIES.get(kind, "diffusion-drafter")
    licence = "apache-2.0" if init is None else "other"
    target = opening_name(config.target)
    options = [] if target == DEFAULT_TARGET else ["--target", target]
    chat = Chat(recipe.data.template_kwargs, recipe.data.system)
    arguments = "".join(f" {shlex.quote(word)}" for word in (*options, *chat.arguments))
    title = f"{Path(recipe.output).name}: a drafter (drafter.kind={kind}) for {config.target}"
    trained = module.trained_parameters()
    return render_page(
        Path(__file__).with_name("card.jinja"),
        metadata="\n".join(card_metadata(library, config.target, licence, tags)),
        title=title,
        init=None if init is None else _name(init),
        arguments=arguments,
        drafter=module.drafter,
        trained=sum(w.numel() for name, w in module.final_weights.items() if name in trained),
        covered=coverage(supply.training, module.drafter.draft_vocab, module.drafter.target),
        record=record,
        steps=steps,
        progress=module.progress,
        versions=training_versions(),
        text_share=recipe.data.text_share,
        validation=module.validation_numbers,
    )


def _name(source: str) -> str:
    """A hub id, or the last part of a path."""
    return hub_id(source) or Path(source).name
