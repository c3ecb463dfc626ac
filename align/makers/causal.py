"""Autoregressive drafters as a recipe describes them: `drafter.init`, or the target's own
layers."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor

from align.config.drafter import DrafterConfig
from align.makers.adapted import own_layers
from align.makers.choices import note_ignored
from align.makers.geometry import first_layers
from specalign.common.errors import UserError
from specalign.formats.opened import check_served, first_tokens_logits, refusal_error
from specalign.lm.interface import OWN, register
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading
from specalign.lm.proof import prove_target
from specalign.lm.source import ModelSource
from specalign.models.causal import CausalConfig, CausalDrafter
from specalign.models.families import BASES


def make_causal(target: Target, options: DrafterConfig) -> CausalDrafter:
    """A drafter from `init`, any causal LM over the target's vocabulary, or from the target's
    layers.

    Raises:
        UserError: a layer, vocabulary or architecture that does not fit.
    """
    layers, own = first_layers(target, options), None
    if options.init is None:
        where = f"target {target.spec!r}"
        start = _layers_alone(target, layers)
    else:
        where, layers = f"drafter.init={options.init!r}", []
        start = _load_start(target, options, options.init)
        if not _share_vocabulary(start, target):
            own = start.embedding_VD, start.head_weight_VD
    if start.head_bias_V is not None:
        raise refusal_error(where, "autoregressive", NotImplementedError("its head has a bias"))
    model = start.model.requires_grad_(True)
    base = type(model).__name__
    served_LV = None if base in BASES else first_tokens_logits(start)
    c = model.config
    config = CausalConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        layers=layers,
        target=target.spec,
        target_sha256=target.hash,
        network={"base": base, "hidden_size": c.hidden_size, "layers": c.num_hidden_layers},
    )
    drafter = CausalDrafter(model, config, target, own).to(target.device)
    if served_LV is not None:
        check_served(drafter, served_LV, where)
    return drafter


def _load_start(target: Target, options: DrafterConfig, init: str) -> Target:
    """`drafter.init`. Raises UserError for another vocabulary than the target's."""
    trust = target.trust_remote_code
    start = load_target(init, "float32", str(target.device), fast=False, trust_remote_code=trust)
    if start.vocab_size != target.vocab_size:
        raise UserError(
            f"drafter.init={init!r} has a vocabulary of {start.vocab_size}, "
            f"target {target.spec!r} has {target.vocab_size}"
        )
    note_ignored(options, {"layers": start.num_layers})
    return start


def _layers_alone(target: Target, layers: list[int]) -> Target:
    """A model of these target layers only. Raises UserError if the architecture does not allow
    that."""
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
        make = Target if base in BASES else prove_target
        return make(model, target.tokenizer, ModelSource(target.spec), fast=False)
    except Exception as error:  # models of fewer layers fail in many ways
        raise refusal_error(f"target {target.spec!r}", "autoregressive", error) from None


def _share_vocabulary(one: Target, other: Target) -> bool:
    """Whether both have the same embedding and head."""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.equal(a.float(), b.float())

    heads = one.head_weight_VD, other.head_weight_VD
    return same(one.embedding_VD, other.embedding_VD) and same(*heads)
