"""Autoregressive drafters as a recipe's drafter group asks for them: `drafter.init`, or the target's own layers."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from align.common.errors import UserError
from align.config.drafter import DrafterConfig
from align.makers.choices import say_kept
from align.makers.geometry import first_layers
from align.models.causal import CausalConfig, CausalDrafter
from align.models.checkpoints.adapted import own_layers
from align.models.checkpoints.opened import check_served, first_tokens_logits, refused
from align.models.families import BASES
from align.target.interface import OWN, register
from align.target.loading import load_target
from align.target.model import Target
from align.target.opening import quiet_loading
from align.target.proof import prove_target
from align.target.source import ModelSource


def make_causal(target: Target, options: DrafterConfig) -> CausalDrafter:
    """A drafter after the recipe's drafter group: `init`, any causal LM over the target's vocabulary, or the target's layers.

    Raises:
        UserError: a layer, vocabulary or architecture that does not fit.
    """
    layers = first_layers(target, options)
    own: tuple[Tensor, Tensor] | None = None
    if options.init is not None:
        start = load_target(
            options.init,
            "float32",
            str(target.device),
            fast=False,
            trust_remote_code=target.trust_remote_code,
        )
        if start.vocab_size != target.vocab_size:
            raise UserError(
                f"drafter.init={options.init!r} has a vocabulary of {start.vocab_size}, target {target.spec!r} has "
                f"{target.vocab_size}"
            )
        model, layers = start.model.requires_grad_(True), []
        say_kept(options, {"layers": start.num_layers})
        if not _share_vocabulary(start, target):
            own = start.embedding_VD, start.head_weight_VD
    else:
        start = _own_layers_alone(target, layers)
        model = start.model.requires_grad_(True)
    where = f"target {target.spec!r}" if options.init is None else f"drafter.init={options.init!r}"
    if start.head_bias_V is not None:
        raise refused(where, "autoregressive", NotImplementedError("its head has a bias"))
    served_LV = None if type(model).__name__ in BASES else first_tokens_logits(start)
    c = model.config
    config = CausalConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        layers=layers,
        target=target.spec,
        target_sha256=target.hash,
        network={"base": type(model).__name__, "hidden_size": c.hidden_size, "layers": c.num_hidden_layers},
    )
    drafter = CausalDrafter(model, config, target, own).to(target.device)
    if served_LV is not None:
        check_served(drafter, served_LV, where)
    return drafter


def _own_layers_alone(target: Target, layers: list[int]) -> Target:
    """A model that has these layers of the target's alone. Raises UserError where there can be none."""
    try:
        own = own_layers(target, layers)
        base, config = own.base, own.config
        config.architectures = [base]
        quiet_loading()
        model, found = getattr(transformers, base).from_pretrained(
            None,
            config=config,
            state_dict=own.tensors,
            dtype=torch.float32,
            attn_implementation=register() if base in BASES else OWN,
            output_loading_info=True,
        )
        if lacking := sorted(found["missing_keys"]):
            raise NotImplementedError(f"layers {layers} alone lack {lacking[0]!r}")
        model.to(target.device)
        if base in BASES:
            return Target(model, target.tokenizer, ModelSource(target.spec), fast=False)
        return prove_target(model, target.tokenizer, ModelSource(target.spec), fast=False)
    except Exception as error:  # what a model of fewer layers meets has no common class
        raise refused(f"target {target.spec!r}", "autoregressive", error) from None


def _share_vocabulary(one: Target, other: Target) -> bool:
    """Whether both have the same embedding and head, as a drafter that was made here has its target's."""
    pairs = ((one.embedding_VD, other.embedding_VD), (one.head_weight_VD, other.head_weight_VD))
    return all(a.shape == b.shape and torch.equal(a.float(), b.float()) for a, b in pairs)
