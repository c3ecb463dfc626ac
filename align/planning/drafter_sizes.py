"""The sizes of the drafter that a recipe makes. Of `drafter.init` only config.json is read."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from align.config.drafter import DrafterConfig
from align.config.recipe import Recipe
from align.makers.block import fresh_config
from align.makers.geometry import check_count, first_layers, named_layers, shared_layers, tap_layers
from align.makers.standalone import ddit_config
from align.planning.target_sizes import TargetSizes, read_target_sizes
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, read_config
from specalign.formats.masked_lm import from_config
from specalign.formats.sedd_mdlm import read_plan
from specalign.lm.slabs import LayerShape
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.ddit import DDiT


@dataclass(frozen=True)
class DrafterSizes:
    """Counts of numbers, not bytes. parameters: its own, without the target's embedding and head.
    trained: with gradient and optimizer state. drafted: tokens per draft. rows: of a block's input.
    context: numbers of the target's that it reads per token."""

    kind: str
    parameters: int
    trained: int
    layers: int
    hidden_size: int
    inner_size: int
    num_heads: int
    vocabulary: int
    drafted: int
    rows: int = 0
    context: int = 0


def plan_drafter_sizes(recipe: Recipe, target: TargetSizes) -> DrafterSizes:
    """The sizes of the drafter that `align.train` trains with this recipe. Raises UserError: an
    option that does not fit the target, or a `drafter.init` whose config is unavailable."""
    options = recipe.drafter
    if options.kind == "block":
        return _size_block(options, target)
    if options.kind == "ddit":
        return _size_ddit(options, target)
    if options.kind == "masked_lm":
        return _size_masked_lm(options, target)
    if options.init is None:
        return _size_layers(target, options, first_layers(target, options), 0)
    start = read_target_sizes(options.init)
    return _size_layers(start, options, range(start.num_layers), 0)


def read_init_config(init: str) -> JsonObject:
    """The config.json of `drafter.init`. Raises UserError if it is unavailable."""
    return read_config(model_folder(init, "drafter.init", ["*.json", "*.yaml"]))


def _size_block(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    if options.init is None:
        config = _make_block_config(options, target)
    else:
        where = f"drafter.init={options.init!r}"
        config = BlockConfig.from_dict(read_init_config(options.init), where)
    config.confidence_head = options.confidence_head
    with torch.device("meta"):
        network = BlockDrafter(config, None)  # type: ignore[arg-type]
    total = _count_parameters(network)
    shared = config.context == "shared_kv"
    per_layer = 2 * config.num_key_value_heads * config.head_dim if shared else config.hidden_size
    return DrafterSizes(
        kind="block",
        parameters=total,
        trained=total if options.train == "all" else _count_parameters(network, "confidence."),
        layers=len(network.layers),
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        vocabulary=config.draft_vocab_size or config.vocab_size,
        drafted=config.block_size,
        rows=config.rows,
        context=per_layer * len(config.target_layer_ids),
    )


def _make_block_config(options: DrafterConfig, target: TargetSizes) -> BlockConfig:
    """As `align.makers.block` makes it for a loaded target; values that change no size are
    arbitrary."""
    check_count(target, options.layers)
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


def _count_parameters(network: nn.Module, part: str = "") -> int:
    """The parameters with `part` in their names."""
    return sum(weight.numel() for name, weight in network.named_parameters() if part in name)


def _size_ddit(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    config = ddit_config(options, target.vocab_size)
    if options.init is not None:
        values = read_init_config(options.init)
        config = read_plan(values, f"drafter.init={options.init!r}")[0]
    with torch.device("meta"):
        count = _count_parameters(DDiT(config))
    width, heads = config.hidden_size, config.n_heads
    shape = (config.n_blocks, width, 4 * width, heads, config.vocab_size, options.block_size)
    return DrafterSizes("ddit", count, count, *shape)


def _size_masked_lm(options: DrafterConfig, target: TargetSizes) -> DrafterSizes:
    """From a target's layers, or from a published model's config.json."""
    values: JsonObject = {"share_embedding": options.share_embedding}
    if options.init is None:
        values["layers"] = first_layers(target, options)
    else:
        values = read_init_config(options.init)
    if "layers" in values:
        own = 0 if values.get("share_embedding") else target.tables
        return _size_layers(target, options, values["layers"], own)
    with torch.device("meta"):
        network = from_config(values, f"drafter.init={options.init!r}")
    count, config = _count_parameters(network), network.model.config
    width, heads = config.hidden_size, config.num_attention_heads
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    shape = (config.num_hidden_layers, width, inner, heads, config.vocab_size, options.block_size)
    return DrafterSizes("masked_lm", count, count, *shape)


def _size_layers(
    target: TargetSizes, options: DrafterConfig, layers: Sequence[int], tables: int
) -> DrafterSizes:
    """A drafter made of the target's layers, with this many numbers in its own tables."""
    named = [n for name, n in target.linears if name.rpartition(".")[2] in options.lora_targets]
    updates = len(layers) * options.lora_rank * sum(named)
    total = sum(target.layers[i] for i in layers) + target.last_norm + tables + updates
    width, inner, heads = target.hidden_size, target.inner_size, target.num_heads
    shape = (len(layers), width, inner, heads, target.vocab_size, options.block_size)
    return DrafterSizes(options.kind, total, updates or total, *shape)
