"""Exports in the engines' own classes, for the comparison in one process."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel

from specalign.common.errors import UserError
from specalign.common.schema import read_config
from specalign.lm.opening import quiet_loading


@dataclass(frozen=True)
class EngineDrafter:
    """An export in an engine's own class.

    settings: with `target_layer_ids`, `mask_token_id` and `block_size`. embed: tokens (n,) → (n,
    D). run: embedded block (1, R, D), taps (1, n, F·D) and positions (1, n + R) → hidden states
    after the last norm (1, R, D).
    """

    settings: Any
    embed: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


def open_assistant(folder: Path, model: Any) -> EngineDrafter:
    """In transformers' class. model: the target. Raises UserError for one with custom code."""
    if "auto_map" in read_config(folder):
        raise UserError("comes with custom Python code, which is not run")
    quiet_loading()
    # trust_remote_code: if it is not given, transformers asks on the terminal
    network = AutoModel.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    network = network.eval().to(model.device)

    def embed(tokens: Tensor) -> Tensor:
        return model.get_input_embeddings()(tokens).float()

    def run(embedded_1RD: Tensor, taps_1LD: Tensor, positions_1L: Tensor) -> Tensor:
        return network(
            noise_embeds=embedded_1RD,
            context_hidden_states=taps_1LD,
            position_ids=positions_1L,
            attention_mask=None,
        ).last_hidden_state

    return EngineDrafter(network.config, embed, run)


def open_package(folder: Path, model: Any) -> EngineDrafter:
    """In the class of the dflash package."""
    kind = importlib.import_module("dflash.model").DFlashDraftModel
    network = kind.from_pretrained(folder, dtype=torch.float32).eval().to(model.device)
    scale = float(getattr(network.config, "dflash_config", {}).get("input_embedding_scale", 1.0))

    def embed(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, model.get_input_embeddings().weight).float() * scale

    def run(embedded_1RD: Tensor, taps_1LD: Tensor, positions_1L: Tensor) -> Tensor:
        return network(
            target_hidden=taps_1LD, noise_embedding=embedded_1RD, position_ids=positions_1L
        )

    return EngineDrafter(network, embed, run)
