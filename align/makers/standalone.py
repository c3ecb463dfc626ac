"""Standalone diffusion drafters as a recipe's drafter group describes them: `drafter.init`, or
fresh ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from align.config.drafter import DrafterConfig
from align.makers.adapted import adapt
from align.makers.choices import lora_alpha, mask_token, note_ignored
from align.makers.geometry import first_layers
from specalign.common.errors import UserError
from specalign.formats.standalone import architecture, load_standalone
from specalign.lm.model import Target
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import DDiTConfig
from specalign.models.masked_lm import MaskedLM, with_lora
from specalign.models.standalone import DiffusionConfig, DiffusionDrafter


def make_standalone(target: Target, options: DrafterConfig, seed: int = 0) -> DiffusionDrafter:
    """A standalone drafter from `init` as it was saved or published, else a fresh one.

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is not None:
        drafter = _continue_from(options.init, target, options)
    else:
        drafter = _make_fresh(target, options, seed)
    if options.lora_rank:
        if not isinstance(drafter.network, MaskedLM):
            raise UserError("drafter.lora_rank needs drafter.kind=masked_lm")
        with_lora(
            drafter.network, options.lora_rank, lora_alpha(options), options.lora_targets, seed
        )
    return drafter.to(target.device)


def _continue_from(init: str, target: Target, options: DrafterConfig) -> DiffusionDrafter:
    try:
        drafter = load_standalone(init, target)
    except UserError as error:
        raise UserError(f"drafter.init: {error}") from None
    network = drafter.network
    if isinstance(network, MaskedLM) != (options.kind == "masked_lm"):
        raise UserError(f"drafter.init={init!r} is not of drafter.kind={options.kind}")
    has: dict[str, Any]
    if isinstance(network, MaskedLM):
        has = {
            "layers": network.model.config.num_hidden_layers,
            "mask_token_id": network.mask_token_id,
            "attention": network.family.attention,
        }
    else:
        c, process = network.config, drafter.config
        has = {"hidden_size": c.hidden_size, "layers": c.n_blocks, "heads": c.n_heads}
        has |= {
            name: getattr(c, name) for name in ("cond_dim", "dropout", "time_input", "attention")
        }
        has |= {
            "graph": process.graph,
            "schedule": process.schedule["name"],
            "prediction": process.prediction,
        }
    note_ignored(options, has)
    config = replace(drafter.config, block_size=options.block_size, window=options.window)
    return DiffusionDrafter(network, config, target)


def _make_fresh(target: Target, options: DrafterConfig, seed: int) -> DiffusionDrafter:
    network: DDiT | MaskedLM
    prediction = options.prediction
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if options.kind == "masked_lm":
            layers, share = first_layers(target, options), options.share_embedding
            mask = mask_token(target) if options.mask_token_id is None else options.mask_token_id
            network = adapt(
                target, layers, mask, attention=options.attention, share_embedding=share
            )
            prediction = "logits"  # not log-scores: their sum is far from 1
        else:
            network = DDiT(ddit_config(options, target.vocab_size))
    config = DiffusionConfig(
        block_size=options.block_size,
        vocab_size=target.vocab_size,
        graph=options.graph,
        schedule={"name": options.schedule},
        prediction=prediction,
        window=options.window,
        target=target.spec,
        target_sha256=target.hash,
        network=architecture(network),
    )
    return DiffusionDrafter(network, config, target)


def ddit_config(options: DrafterConfig, vocab_size: int) -> DDiTConfig:
    """The network of a fresh `ddit` drafter; `vocab_size`: the target's."""
    absorbing = options.graph == "absorbing"
    return DDiTConfig(
        vocab_size=vocab_size + absorbing,
        hidden_size=options.hidden_size,
        n_blocks=options.layers,
        n_heads=options.heads,
        cond_dim=options.cond_dim,
        dropout=options.dropout,
        time_input=options.time_input,
        norm_bias=options.time_input == "none",
        scale_by_sigma=absorbing
        and options.prediction == "log_score"
        and options.time_input != "none",
        attention=options.attention,
    )
