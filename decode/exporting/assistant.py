"""transformers' own DFlash assistant (`speculation_type="dflash"`, since 5.17). Fill-in blocks, the
whole vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel

from decode.exporting import qwen3
from decode.exporting.base import EngineDrafter, Format
from decode.exporting.folder import Exported
from decode.exporting.serving import ServedTarget, Snippet, python_text, transformers_script
from specalign.common.errors import UserError
from specalign.common.schema import read_config
from specalign.formats.layouts import ASSISTANT
from specalign.lm.opening import quiet_loading
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
_UNUSED = ("vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal")


def make_assistant(drafter: BlockDrafter) -> Exported:
    """The assistant model that transformers opens itself. Raises UserError if it can't hold the
    drafter."""
    qwen3.check_fits(drafter, "transformers", layout="fill_in", biases=False)
    qwen3.check_head_bias(drafter, "transformers")
    config = {
        **qwen3.qwen3_config(drafter),
        **qwen3.taps_config(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT,
        "sliding_window": drafter.target.context_limit,  # required, although no layer slides
    }
    config = {key: value for key, value in config.items() if key not in _UNUSED}
    tensors = {_NAMES.get(name, name): t for name, t in qwen3.published_tensors(drafter).items()}
    notes = [qwen3.WHOLE_VOCABULARY] if drafter.config.draft_vocab_size else []
    return Exported(config, tensors, notes)


def serve_assistant(config: BlockConfig, target: ServedTarget, folder: str) -> list[Snippet]:
    assistant = f"assistant = AutoModel.from_pretrained({python_text(folder)}, dtype=model.dtype)"
    options = 'assistant_model=assistant, speculation_type="dflash"'
    return [transformers_script(target, assistant, options)]


def open_assistant(folder: Path, model: Any) -> EngineDrafter:
    """An export in transformers' class. Raises UserError for one with custom code."""
    if "auto_map" in read_config(folder):
        raise UserError(
            "comes with custom Python code, which is not run; decode.export writes none"
        )
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

    return EngineDrafter(network, network.config, embed, network.encoder, run)


TRANSFORMERS = Format(
    "transformers",
    make_assistant,
    serve_assistant,
    library="transformers",
    open_engine=open_assistant,
)
