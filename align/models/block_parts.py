"""A block drafter's start weights, and the same drafter with a part added, replaced or taken away."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from align.common.errors import in_one_line
from align.models.block import BlockDrafter
from align.models.block_layers import BlockLayer
from align.models.markov import MarkovHead
from align.models.masked_lm import lora_config
from align.target.inspection.parts import last_norm, layer_parts
from align.target.model import Target

FRESH = "fresh"
"""In a config's `extra`: the weights of its layers that did not start from the target's."""


@torch.no_grad()
def initialise(drafter: BlockDrafter, target: Target, from_layers: bool) -> None:
    """Start weights of a new drafter: random ones, over them the target's layers and norm where `from_layers`; the context
    projection starts as a mean (taps) or small (shared_kv)."""
    config, width = drafter.config, drafter.config.hidden_size
    for name, parameter in drafter.named_parameters():
        if (
            parameter.dim() == 2
            and not name.startswith(("confidence.", "estimate."))
            and "_conv." not in name
        ):
            parameter.normal_(0.0, 0.02)
    if from_layers:
        fresh = _start_from_layers(drafter, target)
        if fresh:
            drafter.config = replace(config, extra={**config.extra, FRESH: fresh})
    if config.context == "taps":
        count = len(config.target_layer_ids)
        drafter.fc.weight.copy_(torch.eye(width).repeat(1, count) / count)
    else:
        # an embedding's own size is about 0.1: more would drown the anchor token
        drafter.fc.weight.copy_(0.02 * torch.eye(width))
    if drafter.markov is not None:
        _start_markov(drafter, drafter.markov)


def _start_from_layers(drafter: BlockDrafter, target: Target) -> list[str]:
    """Copy the target's layers and last norm as far as their shapes agree. Returns the names of a layer's weights that stay fresh
    in some layer."""
    config, fresh = drafter.config, dict[str, None]()
    # q has no scale behind its head: the norm before it starts with the target's
    if (weight := last_norm(target)) is not None:
        drafter.norm.weight.copy_(weight * target.logit_form.scale)
    for layer, index in zip(drafter.blocks, config.init_layer_ids, strict=True):
        fresh |= dict.fromkeys(_copy_layer(layer, layer_parts(target, index)))
    return list(fresh)


def _start_markov(drafter: BlockDrafter, markov: MarkovHead) -> None:
    """A bias of zero over the head's leading directions."""
    markov.silence()
    head = drafter.head_weight_VdD.float()
    # on the host: a GPU finds the directions in thousands of small steps, and other processes on it wait for each
    values, vectors = torch.linalg.eigh((head.T @ head / head.shape[0]).cpu())
    leading = vectors[:, -drafter.config.markov_rank :].to(head.device)
    markov.basis.copy_((head @ leading).T / values[-1].sqrt().item())


def with_convolution(drafter: BlockDrafter) -> BlockDrafter:
    """The same drafter with two-tap convolutions; those that it gets compute nothing yet: it drafts as it did, to the bit."""
    if not drafter.config.convolution:
        drafter.config = replace(drafter.config, convolution=True)
        for layer in drafter.blocks:
            layer.add_convolution(drafter.config)
    return drafter


def with_self_conditioning(drafter: BlockDrafter) -> BlockDrafter:
    """The same drafter with a second pass, which sees nothing of the first yet: it drafts as it did, to the bit."""
    if not drafter.config.self_conditioning:
        drafter.config = replace(drafter.config, self_conditioning=True)
        drafter.add_estimate()
    return drafter


@torch.no_grad()
def with_markov(drafter: BlockDrafter, kind: str, rank: int, width: int, seed: int) -> BlockDrafter:
    """The same drafter with a fresh Markov head, its bias zero, in place of the one that it has; random weights from `seed`."""
    drafter = without_markov(drafter)
    drafter.config = replace(drafter.config, markov=kind, markov_rank=rank, markov_width=width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        markov = drafter.new_markov()
        for parameter in markov.parameters():
            parameter.normal_(0.0, 0.02)
    markov.to(drafter.norm.weight.device)
    drafter.markov = markov
    _start_markov(drafter, markov)
    return drafter


def without_markov(drafter: BlockDrafter) -> BlockDrafter:
    """The same drafter, its positions independent given the context."""
    if drafter.config.confidence_input == "markov":  # which reads the head that goes
        drafter = with_confidence(without_confidence(drafter))
    drafter.config = replace(drafter.config, markov="", markov_rank=0, markov_width=0, markov_bias=False)
    drafter.markov = None
    return drafter


def with_low_rank(
    drafter: BlockDrafter, rank: int, alpha: float, targets: Sequence[str], seed: int
) -> BlockDrafter:
    """The same drafter, frozen, with low-rank updates of the linear layers whose names end in `targets` (LoRA, arXiv 2106.09685), which
    start at zero: it drafts as it did. `merge_low_rank` adds them to the weights.

    Raises:
        UserError: the package `peft` is not installed, or there is no such layer.
    """
    config = lora_config(rank, alpha, targets)
    from peft import LoraModel

    with in_one_line("LoRA"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter.updates = [LoraModel(drafter, {"default": config}, "default")]
    return drafter


def merge_low_rank(drafter: BlockDrafter) -> None:
    """Add the low-rank updates to the weights that they update; without any, nothing happens."""
    while drafter.updates:
        drafter.updates.pop().merge_and_unload()


def with_confidence(drafter: BlockDrafter) -> BlockDrafter:
    """The same drafter with a confidence head, fresh unless it has one."""
    if drafter.confidence is not None:
        return drafter
    drafter.config = replace(drafter.config, confidence_head=True, confidence_input="")
    drafter.confidence = drafter.new_confidence().to(drafter.norm.weight.device)
    return drafter


def without_confidence(drafter: BlockDrafter) -> BlockDrafter:
    """The same drafter without such a head, which would predict the acceptance of weights that further training changes."""
    drafter.config = replace(drafter.config, confidence_head=False, confidence_input="")
    drafter.confidence = None
    return drafter


def _copy_layer(layer: BlockLayer, theirs: dict[str, Tensor]) -> list[str]:
    """Copy a target layer's weights, found by `layer_parts`; QK-norms that the target lacks start at its queries' and keys' typical
    rms. Returns the names of those that it has not, convolutions aside."""
    norm, fresh = theirs.get("input_layernorm.weight"), []
    for name, parameter in layer.named_parameters():
        if name in theirs and theirs[name].shape == parameter.shape:
            parameter.copy_(theirs[name])
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            projection = theirs.get(name.replace("_norm", "_proj"))
            if projection is not None and norm is not None:
                parameter.fill_(float((projection * norm.to(projection.device)).pow(2).sum(1).mean().sqrt()))
        elif "_conv." not in name:
            fresh.append(name)
    return fresh
