"""DFlash (arXiv 2602.06036): read by vLLM, SGLang and the `dflash` package. Fill-in blocks, no
Markov head."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decode.exporting import qwen3
from decode.exporting.base import EngineDrafter, Format
from decode.exporting.folder import Exported
from decode.exporting.serving import ServedTarget, Snippet, sglang_line, vllm_line
from specalign.lm.inspection.parts import embedding_scale
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig


def make_dflash(drafter: BlockDrafter, name: str = "dflash") -> Exported:
    """DFlash's own folder. `name`: of the format, for errors. Raises UserError if it can't hold the
    drafter."""
    qwen3.check_fits(drafter, name, layout="fill_in")
    if name == "dflash":
        qwen3.check_head_bias(drafter, name)
    nested: dict[str, Any] = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    scale = embedding_scale(drafter.target)
    if scale != 1:
        nested["input_embedding_scale"] = scale
    config = {
        "architectures": ["DFlashDraftModel"],
        **qwen3.qwen3_config(drafter),
        **qwen3.taps_config(drafter),
        "dflash_config": nested,
    }
    made = Exported(config, qwen3.published_tensors(drafter))
    qwen3.add_draft_vocabulary(made, drafter)
    qwen3.add_scaled_embedding(made, drafter)
    return made


def serve_dflash(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    """Both servers run drafters with silu only."""
    if config.hidden_act != "silu":
        return []
    drafts = config.block_size
    return [
        vllm_line("dflash", target, folder, drafts),
        sglang_line("DFLASH", target, folder, drafts),
    ]


def open_package(folder: Path, model: Any) -> EngineDrafter:
    """An export in the class of the dflash package."""
    kind = importlib.import_module("dflash.model").DFlashDraftModel
    network = kind.from_pretrained(folder, dtype=torch.float32).eval().to(model.device)
    scale = float(getattr(network.config, "dflash_config", {}).get("input_embedding_scale", 1.0))

    def embed(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, model.get_input_embeddings().weight).float() * scale

    def run(embedded_1RD: Tensor, taps_1LD: Tensor, positions_1L: Tensor) -> Tensor:
        return network(
            target_hidden=taps_1LD, noise_embedding=embedded_1RD, position_ids=positions_1L
        )

    return EngineDrafter(
        network, network, embed, lambda taps: network.hidden_norm(network.fc(taps)), run
    )


DFLASH = Format("dflash", make_dflash, serve_dflash, open_engine=open_package, package="dflash")
