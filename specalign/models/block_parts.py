"""A fresh block drafter's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specalign.lm.inspection.parts import last_norm, layer_parts
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_layers import BlockLayer
from specalign.models.markov import MarkovHead


@torch.no_grad()
def initialise(drafter: BlockDrafter, target: Target, from_layers: bool) -> None:
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
