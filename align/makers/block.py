"""Block drafters as a recipe's drafter group asks for them: from the target's layers, from nothing, or from `drafter.init`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from align.common.errors import UserError
from align.common.text import say
from align.config.drafter import DrafterConfig
from align.makers.choices import lora_alpha, mask_token, say_kept
from align.makers.geometry import (
    Sizes,
    activation,
    check_count,
    check_taps,
    has_attention_bias,
    inner_size,
    named_layers,
    norm_eps,
    own_shape,
    own_tables,
    shared_keys,
    start_layers,
    tap_layers,
)
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.block_parts import (
    initialise,
    with_confidence,
    with_convolution,
    with_low_rank,
    with_markov,
    with_self_conditioning,
    without_confidence,
    without_markov,
)
from align.models.checkpoints.block import load_drafter
from align.models.markov import OLD_NAMES
from align.target.inspection.keys import Rotary, plain_rotary
from align.target.model import Target
from align.target.slabs import LayerShape


def make_block(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """A block drafter after the recipe's drafter group: `init` as it was saved, with the confidence head, convolutions, second
    pass, Markov head and low-rank updates that are asked for, or a fresh one that drafts over `draft_vocab` (None = the whole
    vocabulary).

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is None:
        drafter = from_target(target, options, draft_vocab, seed)
    else:
        drafter = load_drafter(options.init, target)
        _check_layout(drafter, options)
        _say_kept(drafter, options)
        if options.confidence_head:
            drafter = with_confidence(drafter)
        elif drafter.confidence is not None:
            say(
                "drafter.init: its confidence head is left out (drafter.confidence_head=true keeps it)",
                error=True,
            )
            drafter = without_confidence(drafter)
        if options.convolution:
            drafter = with_convolution(drafter)
        if options.self_conditioning:
            drafter = with_self_conditioning(drafter)
        drafter = _with_asked_markov(drafter, options, seed)
        # the same weights in another dtype are another target, and what is learnt here is this one
        drafter.config = replace(drafter.config, target=target.spec, target_sha256=target.hash)
    if options.lora_rank:
        with_low_rank(drafter, options.lora_rank, lora_alpha(options), options.lora_targets, seed)
    if options.train == "confidence_head":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("confidence."))
    return drafter


def _check_layout(drafter: BlockDrafter, options: DrafterConfig) -> None:
    """Raises UserError where the recipe names another layout than `drafter.init` was trained in."""
    asked, own = options.block_layout, drafter.config.block_layout
    if asked not in (None, own):
        raise UserError(
            f"drafter.block_layout={asked}: drafter.init={options.init!r} was trained in {own}; leave it out"
        )


def _say_kept(drafter: BlockDrafter, options: DrafterConfig) -> None:
    """Say what the recipe asks for and `drafter.init` has otherwise."""
    own, asked = drafter.config, {}
    has: dict[str, Any] = {
        "context": own.context,
        "block_size": own.block_size,
        "layers": len(own.init_layer_ids),
        "target_layers": own.target_layer_ids,
        "draft_vocab": own.draft_vocab_size,
        "mask_token_id": own.mask_token_id,
    }
    if own.context == "taps" and options.target_layers is None:
        has["taps"] = len(own.target_layer_ids)
    if options.target_layers is not None:
        count = own.num_target_layers
        asked["target_layers"] = [i + count if i < 0 else i for i in options.target_layers]
    say_kept(options, has, asked)


def _with_asked_markov(drafter: BlockDrafter, options: DrafterConfig, seed: int) -> BlockDrafter:
    """The drafter of `drafter.init` with the Markov head that the recipe asks for, fresh where its own is another."""
    config, asked = drafter.config, asked_markov(drafter.config, options)
    kind, rank, width = asked
    if asked == (config.markov, config.markov_rank, config.markov_width) or rank == config.markov_rank == 0:
        return drafter
    check_rank(drafter.target, rank)
    own = f"its Markov head ({config.markov_kind}, rank {config.markov_rank})"
    fresh = f"a fresh one ({kind or 'silu'}, rank {rank})"
    if not rank:
        say(f"drafter.init: {own} is left out (drafter.markov_rank=0)", error=True)
    elif config.markov_rank:
        say(f"drafter.init: {own} gives way to {fresh}", error=True)
    else:
        say(f"drafter.init: it has no Markov head and gets {fresh}", error=True)
    return with_markov(drafter, kind, rank, width, seed) if rank else without_markov(drafter)


def asked_markov(config: BlockConfig, options: DrafterConfig) -> tuple[str, int, int]:
    """`markov`, `markov_rank` and `markov_width` of a drafter that starts from `drafter.init`, `config`: its own where the recipe
    names neither kind nor rank (the default's can't be told from none)."""
    unnamed = (DrafterConfig().markov_rank, config.markov_rank)
    if options.markov is None and options.markov_rank in unnamed:
        return config.markov, config.markov_rank, config.markov_width
    kind, width = markov_kind(options, config.markov_kind)
    return kind, options.markov_rank, width


def markov_kind(options: DrafterConfig, usual: str = "") -> tuple[str, int]:
    """`markov` and `markov_width` of the config. usual: the kind where the recipe names none; "" = silu."""
    named = options.markov or usual or "silu"
    kind = OLD_NAMES.get(named, named)
    kind = "" if kind == "silu" or not options.markov_rank else kind
    return kind, options.markov_width if kind == "mlp" else 0


def check_rank(target: Sizes, rank: int) -> None:
    """Raises UserError for a Markov head wider than the target."""
    if rank > target.hidden_size:
        raise UserError(f"drafter.markov_rank={rank}: at most {target.hidden_size}, the target's width")


def from_target(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """A fresh drafter for `target` after the recipe's drafter group, by default starting from the target's layers.

    Raises:
        UserError: an option that does not fit the target.
    """
    config = block_config(target, options, draft_vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = BlockDrafter(config, target, draft_vocab)
        initialise(drafter, target, options.init_from_target)
    return drafter.to(target.device)


def block_config(target: Target, options: DrafterConfig, draft_vocab: Tensor | None) -> BlockConfig:
    """The architecture of a fresh block drafter. Raises UserError for an option that does not fit the target."""
    shared = options.context == "shared_kv"
    if (width := target.embedding_VD.shape[-1]) != target.hidden_size:
        raise UserError(
            f"drafter.kind=block: target {target.spec!r} embeds tokens in {width} numbers and computes in {target.hidden_size} "
            "(drafter.kind=autoregressive or masked_lm)"
        )
    check_count(target, options.layers)
    check_rank(target, options.markov_rank)
    rotaries: list[Rotary] = []
    if shared:
        chosen, rotaries = shared_keys(target, options)
        shape = target.anatomy.shapes[chosen[0]]
    else:
        chosen = named_layers(target, options.target_layers) or tap_layers(target.num_layers, options.taps)
        check_taps(target, chosen)
        shape = own_shape(target)
    if shared and len(chosen) != options.layers:
        raise UserError(
            f"drafter.target_layers names {len(chosen)} layers for drafter.layers={options.layers}"
        )
    assert shape is not None
    if (not shared or all(r.full(shape.key) and r.inv_freq for r in rotaries)) and own_tables(
        target, shape.key, rotaries
    ):
        written: list[Rotary] = []  # by the target's own module
    else:
        written = list(dict.fromkeys(rotaries)) or [plain_rotary(shape.key, target.rope_theta)]
        written = rotaries if len(written) > 1 else written
    return fresh_config(
        target,
        options,
        shape,
        layers=chosen,
        start=start_layers(target, options.layers),
        draft_vocab_size=0 if draft_vocab is None else len(draft_vocab),
        intermediate_size=inner_size(target),
        rms_norm_eps=norm_eps(target),
        hidden_act=activation(target),
        mask_token_id=mask_token(target) if options.mask_token_id is None else options.mask_token_id,
        rope_theta=target.rope_theta,
        target_sha256=target.hash,
        attention_bias=has_attention_bias(target)
        if options.attention_bias is None
        else options.attention_bias,
        rotary=[r.entry() for r in written],
        places=any(not r.inv_freq for r in written),
    )


def fresh_config(
    target: Sizes,
    options: DrafterConfig,
    shape: LayerShape,
    layers: list[int],
    start: list[int],
    **known: Any,
) -> BlockConfig:
    """The architecture of a fresh block drafter, from sizes.

    Args:
        shape: of its keys and values. layers: whose keys and values, or whose outputs, it reads. start: which its own start from, where
            it reads outputs. known: further fields.
    """
    shared = options.context == "shared_kv"
    markov, markov_width = markov_kind(options)
    return BlockConfig(
        context=options.context,
        block_size=options.block_size,
        block_layout=options.block_layout or "anchor_first",
        target_layer_ids=layers,
        init_layer_ids=layers if shared else start,
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads if target.num_heads % shape.heads == 0 else shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.key,
        value_dim=0 if shape.value == shape.key else shape.value,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target=target.spec,
        qk_norm=not shared,
        markov_rank=options.markov_rank,
        markov=markov,
        markov_width=markov_width,
        convolution=options.convolution,
        self_conditioning=options.self_conditioning,
        confidence_head=options.confidence_head,
        **known,
    )
