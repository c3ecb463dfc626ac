"""The size of the drafter that a recipe makes, from the target's sizes alone: its network on torch's `meta` device. Of
`drafter.init` the config.json is read, here or on the hub, never the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from align.common.errors import UserError
from align.common.hub import is_hub_id, local_path, missing, model_folder
from align.common.schema import read_object
from align.config.drafter import PARTS, DrafterConfig
from align.config.parser import load_recipe
from align.config.recipe import Recipe
from align.config.recipe_files import shipped
from align.makers.block import asked_markov, check_rank, fresh_config
from align.makers.geometry import check_count, first_layers, named_layers, shared_layers, tap_layers
from align.makers.standalone import ddit_config
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.masked_lm import from_config
from align.models.checkpoints.published_config import read_plan
from align.models.ddit import DDiT
from align.planning.skeleton import Skeleton
from align.target.slabs import LayerShape
from align.training.optimizer import is_matrix


@dataclass(frozen=True)
class DrafterSize:
    """Sizes in numbers, not bytes.

    parameters: its own, the target's embedding and head not among them. trained: with gradient and optimizer state. frozen: own
    and not trained (LoRA's base). layers: of them, those that every row is multiplied with. tables: embedding and head of its own.
    rows: of a block's input. vocabulary: over which it drafts. context: numbers of the target's that it is shown of a token.
    matrices: shapes of those that `trainer.optimizer=muon` moves.
    """

    kind: str
    parameters: int
    trained: int
    layers: int
    count: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    rows: int
    drafted: int
    tables: int = 0
    context: int = 0
    markov_rank: int = 0
    passes: int = 1
    matrices: tuple[tuple[int, int], ...] = ()

    @property
    def own_head(self) -> bool:
        """Whether its head is its own, so that logits have weight gradients."""
        return self.tables > 0


def drafter_size(recipe: Recipe, target: Skeleton) -> DrafterSize:
    """Of the drafter that `align.train` with this recipe trains.

    Raises:
        UserError: an option that does not fit the target, or a `drafter.init` whose config can't be had.
    """
    d = _before(recipe)
    if d.kind == "block":
        return _block(d, target)
    if d.kind == "ddit":
        return _ddit(d, target)
    return _masked_lm(d, target) if d.kind == "masked_lm" else _autoregressive(d, target)


def _before(recipe: Recipe) -> DrafterConfig:
    """The drafter group, with that of the shipped recipe which makes `drafter.init` in its place where nobody has made it yet."""
    d = recipe.drafter
    if d.init is None or (local_path(d.init) / "config.json").is_file() or is_hub_id(d.init):
        return d
    maker = Path(d.init).parent.name
    if maker not in shipped():
        return d
    first = load_recipe([f"recipe={maker}"]).drafter
    return replace(
        first,
        block_size=d.block_size,
        lora_rank=d.lora_rank,
        lora_targets=d.lora_targets,
        confidence_head=d.confidence_head,
        train=d.train,
    )


def config_of(init: str) -> dict[str, Any]:
    """The config.json of `drafter.init`. Raises UserError where it can't be had."""
    try:
        folder = model_folder(init, "drafter.init", ["*.json", "*.yaml"])
    except UserError:
        hint = "name a folder that holds its config.json (drafter.init=FOLDER), or drafter.init=null for a fresh one"
        what = "its config.json can't be had here" if is_hub_id(init) else "no such folder"
        raise missing(f"drafter.init={init!r}", init, what, f"; {hint}") from None
    if not (folder / "config.json").is_file():
        raise UserError(f"drafter.init={init!r}: {folder} has no config.json")
    return read_object(folder / "config.json")


def _matrices(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[int, int], ...]:
    return tuple((p.shape[0], p.shape[1]) for name, p in parameters.items() if is_matrix(name, p))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _block(d: DrafterConfig, target: Skeleton) -> DrafterSize:
    config = (
        _fresh_block(d, target)
        if d.init is None
        else BlockConfig.from_dict(config_of(d.init), f"drafter.init={d.init!r}")
    )
    config.confidence_head = d.confidence_head
    config.convolution |= d.convolution
    config.self_conditioning |= d.self_conditioning
    if d.init is not None:
        config.markov, config.markov_rank, config.markov_width = asked_markov(config, d)
    nowhere: Any = None
    with torch.device("meta"):
        drafter = BlockDrafter(config, nowhere)
    own = dict(drafter.named_parameters())
    trained = {n: p for n, p in own.items() if d.train == "all" or PARTS["confidence"] in n}
    updates = _low_rank(drafter, d) if d.lora_rank else 0
    shared = config.context == "shared_kv"
    kept = 2 * config.num_key_value_heads * config.head_dim if shared else config.hidden_size
    return DrafterSize(
        kind="block",
        parameters=sum(p.numel() for p in own.values()) + updates,
        trained=updates or sum(p.numel() for p in trained.values()),
        layers=_count(drafter.layers),
        count=len(drafter.layers),
        hidden_size=config.hidden_size,
        inner_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.draft_vocab_size or config.vocab_size,
        rows=config.rows,
        drafted=config.block_size,
        context=kept * len(config.target_layer_ids),
        markov_rank=config.markov_rank,
        passes=2 if config.self_conditioning else 1,
        matrices=_matrices(trained),
    )


def _low_rank(network: nn.Module, d: DrafterConfig) -> int:
    """Numbers of the low-rank updates of the linear layers that `drafter.lora_targets` names."""
    named = ((name, m) for name, m in network.named_modules() if isinstance(m, nn.Linear))
    return _updates(
        d, [m.in_features + m.out_features for n, m in named if n.rpartition(".")[2] in d.lora_targets]
    )


def _updates(d: DrafterConfig, sizes: list[int]) -> int:
    """Numbers of low-rank updates of layers with so many inputs and outputs each. Raises UserError where there is none."""
    if not sizes:
        raise UserError(f"drafter.lora_targets={d.lora_targets}: no linear layer of that name")
    return d.lora_rank * sum(sizes)


def _fresh_block(d: DrafterConfig, target: Skeleton) -> BlockConfig:
    """As `align.makers.block.block_config` makes it of a loaded target; what has no size is left at anything."""
    check_count(target, d.layers)
    check_rank(target, d.markov_rank)
    count, start = target.num_layers, shared_layers(target.num_layers, d.layers)
    usual = start if d.context == "shared_kv" else [max(0, i) for i in tap_layers(count, d.taps)]
    return fresh_config(
        target,
        d,
        LayerShape(target.num_kv_heads, target.head_dim, target.head_dim),
        layers=named_layers(target, d.target_layers) or usual,
        start=start,
        draft_vocab_size=d.draft_vocab if 0 < d.draft_vocab < target.vocab_size else 0,
        intermediate_size=target.inner_size,
        rms_norm_eps=1e-6,
        hidden_act="silu",
        mask_token_id=0,
        rope_theta=1e4,
        target_sha256="",
    )


def _ddit(d: DrafterConfig, target: Skeleton) -> DrafterSize:
    if d.init is not None:
        values = config_of(d.init)
        family = str(values.get("model_type") or "sedd")
        config = read_plan(values, family, f"drafter.init={d.init!r}", torch.empty(0)).config
    else:
        config = ddit_config(d, target.vocab_size)
    with torch.device("meta"):
        network = DDiT(config)
    every, tables = _count(network), 2 * config.vocab_size * config.hidden_size
    return DrafterSize(
        kind="ddit",
        parameters=every,
        trained=every,
        layers=every - tables,
        count=config.n_blocks,
        hidden_size=config.hidden_size,
        inner_size=4 * config.hidden_size,
        num_heads=config.n_heads,
        num_kv_heads=config.n_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        rows=d.block_size,
        drafted=d.block_size,
        tables=tables,
        matrices=_matrices(dict(network.named_parameters())),
    )


def _masked_lm(d: DrafterConfig, target: Skeleton) -> DrafterSize:
    if d.init is not None:
        found = _opened(d, target)
    else:
        chosen = first_layers(target, d)
        tables = 0 if d.share_embedding else (1 if target.tied else 2) * target.embedding
        found = _like_target(target, "masked_lm", [target.layers[i] for i in chosen], tables, d.block_size)
    if not d.lora_rank:
        return found
    # peft freezes the rest; the updates are rank × (inputs + outputs) of every layer that is named
    added = found.count * _updates(
        d, [i + o for name, i, o in target.linears if name.endswith(tuple(d.lora_targets))]
    )
    return DrafterSize(**{**vars(found), "parameters": found.parameters + added, "trained": added})


def _opened(d: DrafterConfig, target: Skeleton) -> DrafterSize:
    """A masked language model from its config.json: a published one, or one that was made of a target's layers."""
    values, where = config_of(str(d.init)), f"drafter.init={d.init!r}"
    if "base_config" in values:
        layers = [target.layers[i] for i in values.get("layers", [])]
        tables = 0 if values.get("share_embedding") else (1 if target.tied else 2) * target.embedding
        return _like_target(target, "masked_lm", layers, tables, d.block_size)
    with torch.device("meta"):
        network = from_config(values, where)
    c = network.model.config
    every = _count(network)
    embedding = network.model.get_input_embeddings().weight.numel()
    tables = embedding * (1 if c.tie_word_embeddings else 2)
    heads = c.num_attention_heads
    return DrafterSize(
        kind="masked_lm",
        parameters=every,
        trained=every,
        layers=every - tables,
        count=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        inner_size=int(getattr(c, "intermediate_size", None) or 4 * c.hidden_size),
        num_heads=heads,
        num_kv_heads=int(getattr(c, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(c, "head_dim", None) or c.hidden_size // heads),
        vocabulary=c.vocab_size,
        rows=d.block_size,
        drafted=d.block_size,
        tables=tables,
        matrices=_matrices(dict(network.named_parameters())),
    )


def _like_target(target: Skeleton, kind: str, layers: list[int], tables: int, drafted: int) -> DrafterSize:
    own = sum(layers) + target.last_norm
    return DrafterSize(
        kind=kind,
        parameters=own + tables,
        trained=own + tables,
        layers=own,
        count=len(layers),
        hidden_size=target.hidden_size,
        inner_size=target.inner_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        vocabulary=target.vocab_size,
        rows=drafted,
        drafted=drafted,
        tables=tables,
        matrices=tuple((outputs, inputs) for _, inputs, outputs in target.linears) * len(layers),
    )


def _autoregressive(d: DrafterConfig, target: Skeleton) -> DrafterSize:
    if d.init is not None:
        from align.planning.skeleton import skeleton

        start = skeleton(d.init)
        return _like_target(start, "autoregressive", list(start.layers), 0, d.block_size)
    chosen = first_layers(target, d)
    return _like_target(target, "autoregressive", [target.layers[i] for i in chosen], 0, d.block_size)
