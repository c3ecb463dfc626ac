"""The speculators package's layout of DFlash, written; vLLM reads it too. Fill-in blocks, no Markov
head."""

from __future__ import annotations

import torch

from specalign.formats.qwen3 import (
    Exported,
    add_draft_vocabulary,
    add_scaled_embedding,
    check_fits,
    published_tensors,
    qwen3_config,
)
from specalign.models.block import BlockDrafter


def make_speculators(drafter: BlockDrafter) -> Exported:
    """The folder of the speculators package. Raises UserError if it can't hold the drafter."""
    check_fits(drafter, "speculators", layout="fill_in")
    c, target = drafter.config, drafter.target
    inner = qwen3_config(drafter)
    architectures = getattr(target.config, "architectures", None) or [type(target.model).__name__]
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": inner,
        "draft_vocab_size": drafter.draft_size,
        "block_size": c.rows,
        "aux_hidden_state_layer_ids": [i + 1 for i in c.target_layer_ids],  # 0 is the embedding
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
    made = Exported(config, published_tensors(drafter))
    add_draft_vocabulary(made, drafter)
    if drafter.draft_vocab is not None:
        known = torch.zeros(c.vocab_size, dtype=torch.bool)
        known[drafter.draft_vocab.cpu()] = True
        made.tensors["t2d"] = known
    add_scaled_embedding(made, drafter)
    return made
