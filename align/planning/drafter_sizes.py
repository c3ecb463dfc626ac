"""The sizes of the drafter that a recipe makes, from the target's sizes. Of `drafter.init` only config.json is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from align.common.errors import UserError
from align.common.hub import is_hub_id, local_path, missing, model_folder
from align.common.schema import read_config
from align.config.drafter import PARTS, DrafterConfig
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.config.recipe_files import shipped
from align.makers.block import asked_markov, check_rank, fresh_config
from align.makers.geometry import check_count, first_layers, named_layers, shared_layers, tap_layers
from align.makers.standalone import ddit_config
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.masked_model import from_config
from align.models.checkpoints.published_config import read_plan
from align.models.ddit import DDiT
from align.planning.target_sizes import TargetSizes, read_target_sizes
from align.target.slabs import LayerShape


@dataclass(frozen=True)
class DrafterSizes:
    """Counts of numbers, not bytes.

    parameters: its own, without the target's embedding and head. trained: with gradient and optimizer state. rows: of a block's
    input. drafted: tokens per draft. context: numbers of the target's that it reads per token.
    """

    kind: str
    parameters: int
    trained: int
    layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    vocabulary: int
    rows: int
    drafted: int
    context: int = 0


def plan_drafter_sizes(recipe: Recipe, target: TargetSizes) -> DrafterSizes:
    """The sizes of the drafter that `align.train` trains with this recipe.

    Raises:
        UserError: an option that does not fit the target, or a `drafter.init` whose config is unavailable.
    """
    options = _follow_init(recipe.drafter)
    if options.kind == "block":
        return _size_block(options, target)
    if options.kind == "ddit":
        return _size_ddit(options, target)
    if options.kind == "masked_lm":
        return _size_masked_lm(options, target)
    if options.init is not None:
        start = read_target_sizes(options.init)
        return _size_layers(start, options, list(range(start.num_layers)), 0)
    return _size_layers(target, options, first_layers(target, options), 0)


def _follow_init(options: DrafterConfig) -> DrafterConfig:
    """If `drafter.init` is the drafter of a shipped recipe that has not run yet: that recipe's options."""
    init = options.init
    if init is None or (local_path(init) / "config.json").is_file() or is_hub_id(init):
        return options
    maker = Path(init).parent.name
    if maker not in shipped():
        return options
    kept = ("block_size", "lora_rank", "lora_targets", "confidence_head", "train")
    return replace(
        load_recipe([f"recipe={maker}"]).drafter, **{name: getattr(options, name) for name in kept}
    )


def read_init_config(init: str) -> dict[str, Any]:
    """The config.json of `drafter.init`. Raises UserError if it is unavailable."""
    try:
        return read_config(model_folder(init, "drafter.init", ["*.json", "*.yaml"]))
    except UserError:
        hint = "name a folder that holds its config.json (drafter.init=FOLDER), or drafter.init=null for a fresh one"
        what = "its config.json is unavailable" if is_hub_id(init) else "no such folder"
        raise missing(f"drafter.init={init!r}", init, what, f"; {hint}") from None


def _size_block(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    if options.init is None:
        config = _fresh_block(options, target)
    else:
        where = f"drafter.init={options.init!r}"
        config = BlockConfig.from_dict(read_init_config(options.init), where)
        config.markov, config.markov_rank, config.markov_width = asked_markov(config, options)
    config.confidence_head = options.confidence_head
    config.convolution |= options.convolution
    config.self_conditioning |= options.self_conditioning
    no_target: Any = None
    with torch.device("meta"):
        network = BlockDrafter(config, no_target)
    sizes = {name: parameter.numel() for name, parameter in network.named_parameters()}
    trained = [n for name, n in sizes.items() if options.train == "all" or PARTS["confidence"] in name]
    linears = [
        (n, m.in_features, m.out_features) for n, m in network.named_modules() if isinstance(m, nn.Linear)
    ]
    shared = config.context == "shared_kv"
    per_layer = 2 * config.num_key_value_heads * config.head_dim if shared else config.hidden_size
    found = DrafterSizes(
        kind="block",
        parameters=sum(sizes.values()),
        trained=sum(trained),
        layers=len(network.layers),
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        vocabulary=config.draft_vocab_size or config.vocab_size,
        rows=config.rows,
        drafted=config.block_size,
        context=per_layer * len(config.target_layer_ids),
    )
    return _add_lora(found, options, linears)


def _fresh_block(options: DrafterConfig, target: TargetSizes) -> BlockConfig:
    """As `align.makers.block` makes it for a loaded target; values without influence on sizes are arbitrary."""
    check_count(target, options.layers)
    check_rank(target, options.markov_rank)
    start = shared_layers(target.num_layers, options.layers)
    read = start
    if options.context != "shared_kv":
        read = [max(0, i) for i in tap_layers(target.num_layers, options.taps)]
    return fresh_config(
        target,
        options,
        LayerShape(target.num_kv_heads, target.head_dim, target.head_dim),
        layers=named_layers(target, options.target_layers) or read,
        start=start,
        draft_vocab_size=options.draft_vocab if options.draft_vocab < target.vocab_size else 0,
        intermediate_size=target.inner_size,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        mask_token_id=0,
        rope_theta=1e4,
        target_sha256="",
    )


def _add_lora(
    sizes: DrafterSizes, options: DrafterConfig, linears: list[tuple[str, int, int]], times: int = 1
) -> DrafterSizes:
    """With the low-rank updates that `drafter.lora_rank` asks for, which are trained in place of the rest."""
    if not options.lora_rank:
        return sizes
    named = [i + o for name, i, o in linears if name.rpartition(".")[2] in options.lora_targets]
    if not named:
        raise UserError(f"drafter.lora_targets={options.lora_targets}: no linear layer of that name")
    added = times * options.lora_rank * sum(named)
    return replace(sizes, parameters=sizes.parameters + added, trained=added)


def _size_ddit(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    config = ddit_config(options, target.vocab_size)
    if options.init is not None:
        values = read_init_config(options.init)
        family = str(values.get("model_type") or "sedd")
        config = read_plan(values, family, f"drafter.init={options.init!r}", torch.empty(0)).config
    with torch.device("meta"):
        parameters = sum(p.numel() for p in DDiT(config).parameters())
    return DrafterSizes(
        kind="ddit",
        parameters=parameters,
        trained=parameters,
        layers=config.n_blocks,
        hidden_size=config.hidden_size,
        inner_size=4 * config.hidden_size,
        num_heads=config.n_heads,
        vocabulary=config.vocab_size,
        rows=options.block_size,
        drafted=options.block_size,
    )


def _size_masked_lm(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    """From a target's layers, or from a published model's config.json."""
    tables = (1 if target.tied else 2) * target.embedding
    if options.init is None:
        shares, layers = options.share_embedding, first_layers(target, options)
    else:
        values = read_init_config(options.init)
        if "base_config" not in values:
            return _size_published(options, values)
        shares, layers = values.get("share_embedding"), values.get("layers", [])
    found = _size_layers(target, options, layers, 0 if shares else tables)
    return _add_lora(found, options, list(target.linears), found.layers)


def _size_published(options: DrafterConfig, values: dict[str, Any]) -> DrafterSizes:
    with torch.device("meta"):
        network = from_config(values, f"drafter.init={options.init!r}")
    parameters = sum(p.numel() for p in network.parameters())
    config = network.model.config
    found = DrafterSizes(
        kind="masked_lm",
        parameters=parameters,
        trained=parameters,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        inner_size=int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size),
        num_heads=config.num_attention_heads,
        vocabulary=config.vocab_size,
        rows=options.block_size,
        drafted=options.block_size,
    )
    linears = [
        (n, m.in_features, m.out_features) for n, m in network.named_modules() if isinstance(m, nn.Linear)
    ]
    return _add_lora(found, options, linears)


def _size_layers(target: TargetSizes, options: DrafterConfig, layers: list[int], tables: int) -> DrafterSizes:
    """A drafter made of the target's layers, with this many numbers in tables of its own."""
    parameters = sum(target.layers[i] for i in layers) + target.last_norm + tables
    return DrafterSizes(
        kind=options.kind,
        parameters=parameters,
        trained=parameters,
        layers=len(layers),
        hidden_size=target.hidden_size,
        inner_size=target.inner_size,
        num_heads=target.num_heads,
        vocabulary=target.vocab_size,
        rows=options.block_size,
        drafted=options.block_size,
    )
