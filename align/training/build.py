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
from specalign.common.provenance import training_versions
from specalign.common.text import markdown_text
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
    """Markdown with hub metadata. `module.final_weights` are those after `steps` steps."""
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
    start = "" if init is None else f" Training started from {markdown_text(_name(init))}."
    rows = _describe_run(module, supply, steps, record)
    lines = [
        *card_metadata(library, config.target, licence, tags),
        f"# {markdown_text(title)}",
        "",
        f"Drafts {config.block_size} tokens at a time.{start} FOLDER is the folder of this page:",
        "",
        f'    python -m decode.generate --drafter FOLDER{arguments} "your prompt"',
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
        "",
    ]
    return "\n".join(lines)


def _describe_run(
    module: DrafterModule, supply: Supply, steps: int, record: TrainingRecord
) -> dict[str, str]:
    """Rows of the card's table, the last validation's with standard errors."""
    drafter, progress, trained = module.drafter, module.progress, module.trained_parameters()
    count = sum(w.numel() for name, w in module.final_weights.items() if name in trained)
    covered = coverage(supply.training, drafter.draft_vocab, drafter.target)
    versions = training_versions()
    rows = {
        "trainable parameters": f"{count:,}",
        "draft vocabulary": f"{covered:.1%} of the training answers' tokens",
        "target sha256": f"`{drafter.config.target_sha256}`",
        "data": f"{record.samples:,} samples, {record.tokens:,} tokens generated by the target",
        "training": f"{steps:,} steps, {progress.tokens_seen:,} text tokens seen, "
        f"{progress.positions:,} drafted positions, {progress.seconds / 60:.1f} minutes",
        "versions": f"torch {versions['torch']}, transformers {versions['transformers']}, commit "
        f"{versions['git_commit']}",
    }
    if record.text:
        sources = ", ".join(map(markdown_text, record.text))
        share = module.recipe.data.text_share
        rows["other text"] = f"{sources} for {share:.0%} of the steps"
    for kind, one in record.expected_tau.items():
        places = f"standard error; {one.positions:,} positions of held-out text"
        rows[f"expected τ, {kind}"] = f"{one.tau:.3f} ± {one.standard_error:.3f} ({places})"
    if (bound := module.validation_numbers.get("bound")) is not None:
        spread = module.validation_numbers["bound_se"]
        rows["bound, nats per token"] = f"{bound:.3f} ± {spread:.3f}"
    return rows


def _name(source: str) -> str:
    """A hub id, or the last part of a path."""
    return hub_id(source) or Path(source).name
