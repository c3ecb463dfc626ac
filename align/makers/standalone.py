"""Standalone diffusion drafters as a recipe's drafter group asks for them: `drafter.init` as it was saved or published, else fresh ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from align.common.errors import UserError
from align.config.drafter import DrafterConfig
from align.makers.choices import lora_alpha, mask_token, say_kept
from align.makers.geometry import first_layers
from align.models.checkpoints.adapted import adapt
from align.models.checkpoints.standalone import architecture, load_standalone
from align.models.ddit import DDiT
from align.models.ddit_layers import DDiTConfig
from align.models.masked_lm import MaskedLM, with_lora
from align.models.standalone import DiffusionConfig, DiffusionDrafter
from align.target.model import Target


def make_standalone(target: Target, options: DrafterConfig, seed: int = 0) -> DiffusionDrafter:
    """A standalone drafter after the recipe's drafter group: `init` as it was saved or published, else a fresh one.

    Raises:
        UserError: an option that does not fit the target.
    """
    if options.init is not None:
        try:
            drafter = load_standalone(options.init, target, attention_backend=options.attention_backend)
        except UserError as error:
            raise UserError(f"drafter.init: {error}") from None
        if type(drafter.network) is not {"ddit": DDiT, "masked_lm": MaskedLM}[options.kind]:
            raise UserError(f"drafter.init={options.init!r} is not of drafter.kind={options.kind}")
        say_kept(options, _own(drafter))
        config = replace(drafter.config, block_size=options.block_size, window=options.window)
        drafter = DiffusionDrafter(drafter.network, config, target)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _fresh_network(target, options)
        config = DiffusionConfig(
            block_size=options.block_size,
            vocab_size=target.vocab_size,
            graph=options.graph,
            schedule={"name": options.schedule},
            # a language model's logits are no log-scores: their sum is far from 1
            prediction="logits" if options.kind == "masked_lm" else options.prediction,
            window=options.window,
            target=target.spec,
            target_sha256=target.hash,
            network=architecture(network),
        )
        drafter = DiffusionDrafter(network, config, target)
    if options.lora_rank:
        if not isinstance(drafter.network, MaskedLM):
            raise UserError("drafter.lora_rank needs drafter.kind=masked_lm")
        with_lora(drafter.network, options.lora_rank, lora_alpha(options), options.lora_targets, seed)
    return drafter.to(target.device)


def _own(drafter: DiffusionDrafter) -> dict[str, Any]:
    """What options of a recipe's drafter group a drafter has of its own."""
    network = drafter.network
    if isinstance(network, MaskedLM):
        layers = network.model.config.num_hidden_layers
        return {
            "layers": layers,
            "mask_token_id": network.mask_token_id,
            "attention": network.family.attention,
        }
    c, process = network.config, drafter.config
    return {
        "hidden_size": c.hidden_size,
        "layers": c.n_blocks,
        "heads": c.n_heads,
        "cond_dim": c.cond_dim,
        "dropout": c.dropout,
        "time_input": c.time_input,
        "attention": c.attention,
        "graph": process.graph,
        "schedule": process.schedule["name"],
        "prediction": process.prediction,
    }


def _fresh_network(target: Target, options: DrafterConfig) -> DDiT | MaskedLM:
    if options.kind == "masked_lm":
        layers = first_layers(target, options)
        mask = mask_token(target) if options.mask_token_id is None else options.mask_token_id
        return adapt(
            target, layers, mask, attention=options.attention, share_embedding=options.share_embedding
        )
    return DDiT(ddit_config(options, target.vocab_size), options.attention_backend)


def ddit_config(options: DrafterConfig, vocab_size: int) -> DDiTConfig:
    """The network of a fresh `ddit` drafter. vocab_size: the target's."""
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
        scale_by_sigma=absorbing and options.prediction == "log_score" and options.time_input != "none",
        attention=options.attention,
    )
