"""The assistant model that transformers opens itself (`speculation_type="dflash"`, since 5.17),
read and written: DFlash under other names, over the whole vocabulary, without biases."""

from specalign.formats.kinds import ASSISTANT
from specalign.formats.published import Exported, check_fit, qwen3_config, taps_config
from specalign.formats.tensors import NAMES, published_tensors
from specalign.models.block import BlockDrafter

_UNKNOWN = (
    "vocab_size", "attention_bias", "tie_word_embeddings", "num_target_layers", "is_causal",
    "draft_vocab_size",
)  # fmt: skip
"""Keys that the assistant does not have."""


def make_assistant(drafter: BlockDrafter) -> Exported:
    """The assistant's folder. Raises UserError for a drafter that the format can't hold."""
    check_fit(drafter, "transformers", layout="fill_in", biases=False, adds_bias=True)
    config = {
        **qwen3_config(drafter),
        **taps_config(drafter),
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": ASSISTANT,
        "sliding_window": drafter.target.context_limit,  # required, although no layer slides
    }
    config = {key: value for key, value in config.items() if key not in _UNKNOWN}
    theirs = {ours: name for name, ours in NAMES.items()}
    tensors = {theirs.get(name, name): t for name, t in published_tensors(drafter).items()}
    return Exported(config, tensors)
