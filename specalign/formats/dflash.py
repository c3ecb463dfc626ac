"""DFlash's own layout (arXiv 2602.06036; vLLM, SGLang, SpecForge, the `dflash` package), read and
written: fill-in blocks, no Markov head. Settings of the drafter are in `dflash_config` or flat."""

from __future__ import annotations

from specalign.common.schema import JsonObject
from specalign.formats.published import (
    ConfigReader,
    Exported,
    check_architecture,
    check_fits,
    qwen3_config,
    read_layers,
    read_taps,
    taps_config,
)
from specalign.formats.tensors import (
    add_draft_vocabulary,
    add_scaled_embedding,
    published_tensors,
)
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

ARCHITECTURE = "DFlashDraftModel"


def read_dflash(s: ConfigReader, target: Target) -> JsonObject:
    """Settings of a folder's config.json (`read_layers`). Taps that it does not name are evenly
    spread, from layer 1 to the third from the end."""
    check_architecture(s, ARCHITECTURE)
    settings = read_layers(s, target)
    ids = s.get("target_layer_ids")
    if ids is None:
        layers, count = s.get_int("num_target_layers", low=0), s.get_int("num_hidden_layers")
        step = (layers - 4) / max(count - 1, 1)
        ids = [layers // 2] if count == 1 else [round(1 + i * step) for i in range(count)]
    return {**settings, "target_layer_ids": read_taps(s, target, "target_layer_ids", ids)}


def make_dflash(
    drafter: BlockDrafter, name: str = "dflash", biases: bool = True, adds_bias: bool = True
) -> Exported:
    """DFlash's folder. The options are those of `check_fits`. Raises UserError for a drafter that
    the format `name` can't hold."""
    check_fits(drafter, name, layout="fill_in", biases=biases, adds_bias=adds_bias)
    nested: JsonObject = {
        "mask_token_id": drafter.config.mask_token_id,
        "target_layer_ids": list(drafter.config.target_layer_ids),
    }
    scale = embedding_scale(drafter.target)
    if scale != 1:
        nested["input_embedding_scale"] = scale
    layers = {**qwen3_config(drafter), **taps_config(drafter)}
    config = {"architectures": [ARCHITECTURE], **layers, "dflash_config": nested}
    made = Exported(config, published_tensors(drafter))
    add_draft_vocabulary(made, drafter)
    add_scaled_embedding(made, drafter)
    return made
