"""Block drafters as a recipe's drafter group describes them: fresh ones, or `drafter.init` with
changes."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from align.config.drafter import DrafterConfig
from align.makers import geometry
from align.makers.geometry import SizedTarget
from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.common.text import say
from specalign.formats.block import load_drafter
from specalign.lm.inspection.keys import RotaryTable, plain_rotary
from specalign.lm.inspection.parts import last_norm, layer_parts
from specalign.lm.model import Target
from specalign.lm.slabs import LayerShape
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig
from specalign.models.block_layers import BlockLayer, ConfidenceHead
from specalign.models.markov import MarkovHead


def make_block(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """`drafter.init` with the parts that the recipe asks for, else a fresh drafter over
    `draft_vocab` (None = the whole vocabulary). Raises UserError for an option that does not fit
    the target."""
    if options.init is None:
        drafter = from_target(target, options, draft_vocab, seed)
    else:
        drafter = _continue_from(options.init, target, options)
    if options.train == "confidence_head":
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name.startswith("confidence."))
    return drafter


def _continue_from(init: str, target: Target, options: DrafterConfig) -> BlockDrafter:
    drafter = load_drafter(init, target)
    own = drafter.config
    if options.block_layout not in (None, own.block_layout):
        asked = f"drafter.block_layout={options.block_layout}"
        raise UserError(f"{asked}: drafter.init={init!r} was trained with {own.block_layout}")
    same = ("context", "block_size", "mask_token_id", "markov_rank", "convolution")
    has: JsonObject = {name: getattr(own, name) for name in same}
    has |= {"layers": len(own.init_layer_ids), "target_layers": own.target_layer_ids}
    geometry.note_ignored(
        options, {**has, "draft_vocab": own.draft_vocab_size, "markov": own.markov_kind}
    )
    # the same weights in another dtype are another target, and this one is trained on
    config = replace(own, target=target.spec, target_sha256=target.hash)
    if options.confidence_head != own.confidence_head:
        config = replace(config, confidence_head=options.confidence_head, confidence_input="")
        drafter.confidence = None
        if options.confidence_head:
            drafter.confidence = ConfidenceHead(config).to(drafter.norm.weight.device)
        else:  # training would make its predictions wrong
            say("drafter.init: dropping its confidence head", error=True)
    drafter.config = config
    return drafter


def from_target(
    target: Target, options: DrafterConfig, draft_vocab: Tensor | None, seed: int = 0
) -> BlockDrafter:
    """A fresh drafter, by default starting from the target's layers. Raises UserError for an option
    that does not fit the target."""
    config = block_config(target, options, draft_vocab)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = BlockDrafter(config, target, draft_vocab)
        _initialise(drafter, target, options.init_from_target)
    return drafter.to(target.device)


@torch.no_grad()
def _initialise(drafter: BlockDrafter, target: Target, from_layers: bool) -> None:
    """Random weights, replaced by the target's layers and norm if `from_layers`; the context
    projection starts as a mean (taps) or small (shared_kv)."""
    config = drafter.config
    for name, parameter in drafter.named_parameters():
        starts_at_zero = name.startswith("confidence.") or "_conv." in name
        if parameter.dim() == 2 and not starts_at_zero:
            parameter.normal_(0.0, 0.02)
    if from_layers:
        # q has no scale after its head: the norm before it starts with the target's
        if (weight := last_norm(target)) is not None:
            drafter.norm.weight.copy_(weight * target.logit_form.scale)
        for layer, index in zip(drafter.blocks, config.init_layer_ids, strict=True):
            _copy_layer(layer, layer_parts(target, index))
    identity = torch.eye(config.hidden_size)
    if config.context == "taps":
        count = len(config.target_layer_ids)
        drafter.fc.weight.copy_(identity.repeat(1, count) / count)
    else:
        # an embedding's own size is about 0.1: more would drown the anchor token
        drafter.fc.weight.copy_(0.02 * identity)
    if drafter.markov is not None:
        _initialise_markov(drafter, drafter.markov)


def _copy_layer(layer: BlockLayer, theirs: dict[str, Tensor]) -> None:
    """Copy a target layer's weights where shapes agree; QK-norms that the target lacks start at the
    typical rms of its queries and keys."""
    norm = theirs.get("input_layernorm.weight")
    for name, parameter in layer.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            projection = theirs.get(name.replace("_norm", "_proj"))
            if projection is not None and norm is not None:
                rms = (projection * norm.to(projection.device)).pow(2).sum(1).mean().sqrt()
                parameter.fill_(float(rms))


def _initialise_markov(drafter: BlockDrafter, markov: MarkovHead) -> None:
    """A bias of zero over the head's leading directions."""
    for part in markov.silent:
        nn.init.zeros_(markov.get_parameter(f"{part}.weight"))
    head = drafter.head_weight_VdD.float()
    # on the host: a GPU finds the directions in thousands of small steps, and other processes on it
    # wait for each
    values, vectors = torch.linalg.eigh((head.T @ head / head.shape[0]).cpu())
    leading = vectors[:, -drafter.config.markov_rank :].to(head.device)
    markov.basis.copy_((head @ leading).T / values[-1].sqrt().item())


def block_config(target: Target, options: DrafterConfig, draft_vocab: Tensor | None) -> BlockConfig:
    """The architecture of a fresh drafter. Raises UserError for an option that does not fit."""
    if (width := target.embedding_VD.shape[-1]) != target.hidden_size:
        raise UserError(
            f"drafter.kind=block: target {target.spec!r} has embeddings of width {width} and "
            f"layers of width {target.hidden_size}; use drafter.kind=autoregressive or masked_lm"
        )
    geometry.check_count(target, options.layers)
    rotaries: list[RotaryTable] = []
    if options.context == "shared_kv":
        layers, rotaries = geometry.shared_keys(target, options)
        shape = target.anatomy.shapes[layers[0]]
    else:
        spread = geometry.tap_layers(target.num_layers, options.taps)
        layers = geometry.named_layers(target, options.target_layers) or spread
        geometry.check_taps(target, layers)
        shape = geometry.own_shape(target)
    assert shape is not None
    stored = _stored_rotaries(target, shape.key, rotaries)
    mask = options.mask_token_id
    return fresh_config(
        target,
        options,
        shape,
        layers=layers,
        start=geometry.start_layers(target, options.layers),
        draft_vocab_size=0 if draft_vocab is None else len(draft_vocab),
        intermediate_size=geometry.inner_size(target),
        rms_norm_eps=geometry.norm_eps(target),
        hidden_act=geometry.activation(target),
        mask_token_id=geometry.mask_token(target) if mask is None else mask,
        rope_theta=target.rope_theta,
        target_sha256=target.hash,
        attention_bias=geometry.has_attention_bias(target),
        rotary=[r.entry() for r in stored],
        places=any(not r.inv_freq for r in stored),
    )


def _stored_rotaries(target: Target, width: int, rotaries: list[RotaryTable]) -> list[RotaryTable]:
    """The layers' rotaries, one if all are equal, none if the target's module computes them."""
    plain = all(r.full(width) and r.inv_freq for r in rotaries)
    if plain and geometry.matches_target_tables(target, width, rotaries):
        return []
    distinct = list(dict.fromkeys(rotaries)) or [plain_rotary(width, target.rope_theta)]
    return rotaries if len(distinct) > 1 else distinct


def fresh_config(
    target: SizedTarget,
    options: DrafterConfig,
    shape: LayerShape,
    layers: list[int],
    start: list[int],
    **known: Any,
) -> BlockConfig:
    """The architecture of a fresh block drafter. shape: of its keys and values. layers: whose keys
    and values, or whose outputs, it reads. start: which its own start from. known: further
    fields. Raises UserError for a Markov head wider than the target."""
    most = target.hidden_size
    if options.markov_rank > most:
        where = f"drafter.markov_rank={options.markov_rank}"
        raise UserError(f"{where}: at most {most}, the target's width")
    shared = options.context == "shared_kv"
    divides = target.num_heads % shape.heads == 0
    return BlockConfig(
        context=options.context,
        block_size=options.block_size,
        block_layout=options.block_layout or "anchor_first",
        target_layer_ids=layers,
        init_layer_ids=layers if shared else start,
        hidden_size=target.hidden_size,
        num_attention_heads=target.num_heads if divides else shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.key,
        value_dim=0 if shape.value == shape.key else shape.value,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target=target.spec,
        qk_norm=not shared,
        markov_rank=options.markov_rank,
        markov=(options.markov or "") if options.markov_rank else "",
        convolution=options.convolution,
        confidence_head=options.confidence_head,
        **known,
    )
