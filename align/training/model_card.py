"""The model card of a trained drafter, with numbers measured in its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from align.config.recipe import Recipe, resolve
from align.data.text_sources import UNUSED_COLUMN
from specalign.common.errors import UserError
from specalign.common.hub import DEFAULT_TARGET, card_metadata, card_value, hub_id, model_folder
from specalign.common.provenance import training_versions
from specalign.common.text import markdown_text
from specalign.folder.chat import Chat, quote_arguments
from specalign.folder.publishing import opening_name
from specalign.models.block_config import BlockConfig
from specalign.models.block_parts import FRESH
from specalign.models.causal import CausalConfig
from specalign.models.standalone import DiffusionConfig


@dataclass(frozen=True)
class Description:
    """A drafter's library, title, a paragraph of text, tags, and first rows of the table."""

    library: str
    title: str
    text: str
    tags: tuple[str, ...] = ("speculative-decoding", "discrete-diffusion", "drafter")
    rows: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RunNumbers:
    """Numbers of a run. parameters: trained ones. positions: drafted positions in the loss.
    validation: its last metrics."""

    steps: int
    tokens_seen: int
    positions: int
    minutes: float
    parameters: int
    validation: dict[str, float]


def describe_block(recipe: Recipe, config: BlockConfig, coverage: float) -> Description:
    """`coverage`: the share of the training answers' tokens in the draft vocabulary."""
    layers = ", ".join(str(i) for i in config.target_layer_ids)
    return Description(
        "block-drafter",
        f"a block-diffusion drafter for {config.target}",
        f"Drafts {config.block_size} tokens in one pass{_layout(config)}, conditioned on the "
        f"target (`{config.context}`, target "
        f"layers {layers}). "
        f"Useful with that target alone: {_describe_shared(config)}.{_start(recipe, config)}",
        rows=[
            f"| draft vocabulary | {config.draft_vocab_size or config.vocab_size:,} of "
            f"{config.vocab_size:,} tokens, "
            f"{coverage:.1%} of the training answers' tokens |"
        ],
    )


def _layout(config: BlockConfig) -> str:
    """The layout of `fill_in` blocks."""
    return f" over [last token, MASK × {config.block_size}] (`fill_in`)" if config.fill_in else ""


def _describe_shared(config: BlockConfig) -> str:
    if config.own_head:
        return "the embedding is the target's and not stored here"
    return "embedding and head are the target's and not stored here"


def _start(recipe: Recipe, config: BlockConfig) -> str:
    """A sentence on the initialisation of its layers."""
    if (init := recipe.drafter.init) is not None:
        rank = recipe.drafter.lora_rank
        return f" It started from {markdown_text(_name(init))}{f', trained by low-rank updates (rank {rank})' if rank else ''}."
    if not recipe.drafter.init_from_target:
        return " Its layers started from random weights."
    layers = ", ".join(str(i) for i in config.init_layer_ids)
    fresh = dict.fromkeys(name.rpartition(".")[0] for name in config.extra.get(FRESH, []))
    exceptions = f"; fresh were {', '.join(fresh)}" if fresh else ""
    return f" Its layers started from the target's layers {layers}{exceptions}."


def describe_standalone(recipe: Recipe, config: DiffusionConfig, coverage: float) -> Description:
    kind = {"ddit": "DDiT", "masked_lm": "masked language model"}[recipe.drafter.kind]
    return Description(
        "diffusion-drafter",
        f"a standalone diffusion drafter for {config.target}",
        f"A {kind} ({recipe.drafter.attention} attention) that reads tokens "
        "alone; trained in blocks of "
        f"{config.block_size}, stage {recipe.stage}. Its vocabulary is that target's.",
    )


def describe_causal(recipe: Recipe, config: CausalConfig, coverage: float) -> Description:
    layers = ", ".join(str(i) for i in config.layers)
    start = (
        f"layers {layers} of that target"
        if layers
        else markdown_text(_name(str(recipe.drafter.init)))
    )
    return Description(
        "transformers",
        f"a small causal language model that drafts for {config.target}",
        f"It started from {start}; its embedding and head were not trained. transformers opens "
        "this folder as it is. "
        f"τ below is for drafts of {config.block_size} tokens.",
        tags=("speculative-decoding", "drafter"),
    )


def write_card(
    recipe: Recipe,
    about: Description,
    config: BlockConfig | DiffusionConfig | CausalConfig,
    manifest: dict[str, Any],
    run: RunNumbers,
    text: dict[str, Any] | None = None,
) -> str:
    """Markdown with hub metadata.

    Args:
        manifest, text: of the generated data and of `data.text`.
    """
    versions, chat = training_versions(), Chat(recipe.data.template_kwargs, recipe.data.system)
    target = opening_name(config.target)  # `published_texts` replaces a path on upload
    options = [] if target == DEFAULT_TARGET else ["--target", target]
    lines = [
        *card_metadata(about.library, config.target, _licence(recipe.drafter.init), about.tags),
        f"# {markdown_text(f'{Path(recipe.output).name}: {about.title}')}",
        "",
        about.text,
        "",
        "FOLDER is the folder of this page:",
        "",
        "    python -m decode.generate --drafter "
        f'FOLDER{quote_arguments([*options, *chat.arguments])} "your prompt"',
        "",
        "| | |",
        "|---|---|",
        f"| trainable parameters | {run.parameters:,} |",
        *about.rows,
        f"| target sha256 | `{config.target_sha256}` |",
        f"| data | {manifest['samples']:,} samples, {manifest['tokens']:,} tokens generated by the "
        "target "
        f"(temperatures {manifest['prompt_temperature']} / {manifest['answer_temperatures']}, seed "
        f"{manifest['seed']}) |",
        *([f"| prompted with | {markdown_text(chat.description)} |"] if chat else []),
        *([] if text is None else [_text_row(recipe, text)]),
        f"| training | {run.steps:,} steps, {run.tokens_seen:,} text tokens seen, "
        f"{run.positions:,} drafted positions, "
        f"{run.minutes:.1f} minutes |",
        *_validation_rows(run.validation),
        f"| versions | torch {versions['torch']}, transformers {versions['transformers']}, commit "
        f"{versions['git_commit']} |",
        "",
        "The recipe, resolved:",
        "",
        "```yaml",
        yaml.safe_dump(_without_paths(resolve(recipe)), sort_keys=False, width=10**6).rstrip(),
        "```",
        "",
    ]
    return "\n".join(lines)


def _validation_rows(validation: dict[str, float]) -> list[str]:
    """Rows of the last validation."""
    rows = []
    for name, temperature in (("greedy", 0), ("sampling", 1)):
        if f"tau_{name}" in validation:
            tau, error = validation[f"tau_{name}"], validation[f"tau_{name}_se"]
            anchors = int(validation[f"anchors_{name}"])
            rows.append(
                f"| expected τ, {name} | {tau:.3f} ± {error:.3f} (standard error; {anchors:,} "
                "positions of held-out text at "
                f"temperature {temperature}) |"
            )
    if "bound" in validation:
        rows.append(
            f"| bound on held-out blocks, given the text before | {validation['bound']:.3f} ± "
            f"{validation['bound_se']:.3f} nats a "
            f"token (standard error), perplexity {validation['perplexity']:.1f} |"
        )
    if acceptance := [v for k, v in validation.items() if k.startswith("acceptance_")]:
        rows.append(
            f"| acceptance Σmin(p, q) by position | {' / '.join(f'{a:.3f}' for a in acceptance)} |"
        )
    return rows


def _licence(init: str | None) -> str:
    """The licence of the initial weights, `other` if their card names none."""
    if init is None:
        return "apache-2.0"
    try:
        return card_value(model_folder(init, "drafter", ["README.md"]), "license") or "other"
    except (UserError, OSError):  # no folder, or an unreadable card
        return "other"


def _text_row(recipe: Recipe, text: dict[str, Any]) -> str:
    names = ", ".join(
        f"{markdown_text(_name(s['source']))} {s['tokens']:,}" for s in text["sources"]
    )
    counts = text["left_out"].items()
    dropped = sum(n for reason, n in counts if not reason.startswith(UNUSED_COLUMN))
    return (
        f"| other text | the first {recipe.data.text_share:.0%} of the steps: {text['tokens']:,} "
        f"tokens ({names}), "
        f"{dropped:,} documents, pieces and files dropped |"
    )


def _name(source: str) -> str:
    """A hub id, or the last part of a path."""
    return hub_id(source) or Path(source).name


def _without_paths(values: dict[str, Any]) -> dict[str, Any]:
    """The recipe without this machine's paths, except the target's."""
    values = {key: value for key, value in values.items() if key != "output"}
    data = values["data"]
    init, prompts = values["drafter"]["init"], data["prompts"]
    data = {
        **data,
        "path": None,
        "text": [_name(source) for source in data["text"]],
        "prompts": prompts and _name(prompts),
    }
    drafter = {**values["drafter"], "init": init and _name(init)}
    trainer = {**values["trainer"], "features_path": None}
    return {**values, "data": data, "drafter": drafter, "trainer": trainer}
