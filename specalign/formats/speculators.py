"""The layout of the speculators package, read and written: layers under `transformer_layer_config`,
taps counted from the embedding. Written with DFlash's blocks; read with DSpark's heads too."""

from contextlib import suppress

import torch

from specalign.common.schema import JsonObject
from specalign.formats.dspark import read_head_settings
from specalign.formats.published import ConfigReader, Exported, check_fit, qwen3_config
from specalign.formats.tensors import published_tensors, vocabulary_tensors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

_TAPS = "aux_hidden_state_layer_ids"


def read_speculators(s: ConfigReader, target: Target) -> JsonObject:
    """Settings of a folder's config.json (`ConfigReader.read_layers`)."""
    from_anchor = False
    with suppress(KeyError, IndexError, TypeError):  # old folders don't say it otherwise
        method = s.values["speculators_config"]["proposal_methods"][0]
        from_anchor = method["speculative_tokens"] == s.get("block_size")
    settings = s.read_layers(target, from_anchor, _TAPS, shift=1)
    dspark = s.values["speculators_model_type"] == "dspark"
    return {**settings, **(read_head_settings(s) if dspark else {})}


def make_speculators(drafter: BlockDrafter) -> Exported:
    """The package's folder. Raises UserError for a drafter that the format can't hold."""
    check_fit(drafter, "speculators", layout="fill_in")
    c, target = drafter.config, drafter.target
    inner = qwen3_config(drafter)
    architectures = getattr(target.config, "architectures", None) or [type(target.model).__name__]
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": drafter.draft_size,
        "block_size": c.rows,
        _TAPS: [i + 1 for i in c.target_layer_ids],  # 0 is the embedding
        "mask_token_id": c.mask_token_id,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,  # else vLLM runs every layer causally
        "dtype": inner.pop("dtype"),
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": c.block_size}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": c.target, "architectures": list(architectures)},
        },
    }
    tensors = published_tensors(drafter) | vocabulary_tensors(drafter)
    if drafter.draft_vocab is not None:
        tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool)
        tensors["t2d"][drafter.draft_vocab.cpu()] = True
    return Exported(config, tensors)
