"""DFlash (arXiv 2602.06036), written: read by vLLM, SGLang and the `dflash` package. Fill-in
blocks, no Markov head."""

from __future__ import annotations

from specalign.common.schema import JsonObject
from specalign.formats.qwen3 import (
    Exported,
    add_draft_vocabulary,
    add_scaled_embedding,
    check_fits,
    check_head_bias,
    published_tensors,
    qwen3_config,
    taps_config,
)
from specalign.lm.inspection.parts import embedding_scale
from specalign.models.block import BlockDrafter


def make_dflash(drafter: BlockDrafter, name: str = "dflash") -> Exported:
    """DFlash's own folder. `name`: of the format, for errors. Raises UserError if it can't hold the
    drafter."""
    check_fits(drafter, name, layout="fill_in")
    if name == "dflash":
        check_head_bias(drafter, name)
    nested: JsonObject = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    scale = embedding_scale(drafter.target)
    if scale != 1:
        nested["input_embedding_scale"] = scale
    config = {
        "architectures": ["DFlashDraftModel"],
        **qwen3_config(drafter),
        **taps_config(drafter),
        "dflash_config": nested,
    }
    made = Exported(config, published_tensors(drafter))
    add_draft_vocabulary(made, drafter)
    add_scaled_embedding(made, drafter)
    return made
