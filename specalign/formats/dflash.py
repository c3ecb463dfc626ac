"""DFlash's own layout (arXiv 2602.06036; vLLM, SGLang, SpecForge, the `dflash` package), read and
written: fill-in blocks, no Markov head. Settings of the drafter are in `dflash_config` or flat."""

from specalign.common.schema import JsonObject
from specalign.formats.published import ConfigReader, Exported, check_fit, qwen3_config, taps_config
from specalign.formats.tensors import published_tensors, vocabulary_tensors
from specalign.lm.inspection.parts import embedding_scale
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

ARCHITECTURE = "DFlashDraftModel"


def read_dflash(s: ConfigReader, target: Target) -> JsonObject:
    """Settings of a folder's config.json (`ConfigReader.read_layers`). Taps that it does not name are evenly
    spread, from layer 1 to the third from the end."""
    s.check_architecture(ARCHITECTURE)
    if s.get("target_layer_ids") is None:
        layers, count = s.get_int("num_target_layers", low=0), s.get_int("num_hidden_layers")
        step = (layers - 4) / max(count - 1, 1)
        ids = [layers // 2] if count == 1 else [round(1 + i * step) for i in range(count)]
        s.nested = {**s.nested, "target_layer_ids": ids}
    return s.read_layers(target)


def make_dflash(drafter: BlockDrafter) -> Exported:
    """DFlash's folder. Raises UserError for a drafter that the format can't hold."""
    check_fit(drafter, "dflash", layout="fill_in", adds_bias=True)
    taps = taps_config(drafter)
    nested = {name: taps[name] for name in ("mask_token_id", "target_layer_ids")}
    scale = embedding_scale(drafter.target)
    if scale != 1:
        nested["input_embedding_scale"] = scale
    own = {"architectures": [ARCHITECTURE], "dflash_config": nested}
    config = {**own, **qwen3_config(drafter), **taps}
    return Exported(config, published_tensors(drafter) | vocabulary_tensors(drafter))
