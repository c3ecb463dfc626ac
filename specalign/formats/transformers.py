"""transformers' own DFlash assistant (`speculation_type="dflash"`, since 5.17), written. Fill-in
blocks, the whole vocabulary."""

from __future__ import annotations

from specalign.formats.layouts import ASSISTANT
from specalign.formats.qwen3 import (
    WHOLE_VOCABULARY,
    Exported,
    check_fits,
    check_head_bias,
    published_tensors,
    qwen3_config,
    taps_config,
)
from specalign.formats.tensors import NAMES
from specalign.models.block import BlockDrafter

_UNUSED = ("vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal")


def make_assistant(drafter: BlockDrafter) -> Exported:
    """The assistant model that transformers opens itself. Raises UserError if it can't hold the
    drafter."""
    check_fits(drafter, "transformers", layout="fill_in", biases=False)
    check_head_bias(drafter, "transformers")
    config = {
        **qwen3_config(drafter),
        **taps_config(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT,
        "sliding_window": drafter.target.context_limit,  # required, although no layer slides
    }
    config = {key: value for key, value in config.items() if key not in _UNUSED}
    theirs = {ours: name for name, ours in NAMES.items()}
    tensors = {theirs.get(name, name): t for name, t in published_tensors(drafter).items()}
    notes = [WHOLE_VOCABULARY] if drafter.config.draft_vocab_size else []
    return Exported(config, tensors, notes)
