"""Folders of masked-diffusion language models (specalign/models/masked_lm.py), read and written.

Published families (`specalign.models.families`) have their own parameter names and config.json.
Drafters made from a target (`align.makers.standalone`) have transformers' names, and the target's
config under `base_config`.
"""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specalign.common.errors import UserError, in_one_line, nearest
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, read_config, read_object
from specalign.formats.equality import check_opened, refuse_on_error
from specalign.formats.weights import check_shapes, read_folder, weight_files, write_weights
from specalign.lm.inspection.parts import embedding_names
from specalign.lm.masks import register
from specalign.lm.model import Target
from specalign.lm.opening import quiet_loading
from specalign.models.families import BASES, Family, family_of
from specalign.models.masked_lm import MaskedLM, is_lora

ADAPTED = Family("adapted", (), "adapted_masked_lm", ("AdaptedMaskedLM",), "", 0)
"""What `adapt` makes; base, attention, cache and mask are filled in from its config.json."""
ATTENTIONS = ("full", "prefix_causal")
_LOADING = {
    "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype",
    "_name_or_path",
}  # fmt: skip
"""Keys of a config.json that describe loading, not the network."""
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")
"""Tensors that older versions of transformers stored."""


def load_masked_lm(spec: str | Path, target: Target | None = None) -> MaskedLM:
    """A published masked-diffusion language model or an adapted drafter, in fp32 and evaluation
    mode. `target`: for an adapted drafter that shares its target's embedding and head. Raises
    UserError for no known family, or missing, unknown, misshapen or non-finite tensors."""
    folder = model_folder(str(spec), "drafter", ["*.json", "*.safetensors"])
    values = read_config(folder)
    adapted = values.get("architectures") == list(ADAPTED.architectures)
    family = ADAPTED if adapted else family_of(values, str(spec))
    if not weight_files(folder):
        folder = model_folder(str(spec), "drafter", ["*.json", "pytorch_model*.bin"])
    held = read_folder(folder, f"drafter {str(spec)!r}")
    tensors = {family.ours(n): tensor for n, tensor in held.items() if not _BUFFER.search(n)}
    if adapted:
        return adapted_from(values, str(folder), tensors, target)
    config = _make_config(family, values, str(folder))
    model = _fill(family, config, tensors, str(folder))
    family = _with_ids(family, values, folder, config.vocab_size, str(folder))
    return MaskedLM(model, family, values)


def save_masked_lm(network: MaskedLM, folder: Path) -> None:
    """Write the folder in the layout that the network was read from: its family's names, its own
    config.json. Raises ValueError if LoRA weights are not merged."""
    if is_lora(network):
        raise ValueError("merge_lora(network) before it is saved")
    tied = network.model.config.tie_word_embeddings
    tensors = {
        network.family.theirs(name): tensor
        for name, tensor in network.model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    write_weights(tensors, folder)
    write_json(folder / "config.json", network.source)


def adapted_from(
    source: JsonObject, where: str, tensors: dict[str, Tensor], target: Target | None
) -> MaskedLM:
    """The network of an adapted drafter's config.json and tensors."""
    for key in ("base", "base_config", "attention", "mask_token_id", "share_embedding"):
        if key not in source:
            raise UserError(f"{where}: missing key {key!r}, so this is not an adapted drafter")
    base, kind = str(source["base"]), str(source["attention"])
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        near = nearest(base, BASES)
        raise UserError(f"{where}: its architecture {base!r} can't be adapted{near}")
    if kind not in ATTENTIONS:
        raise UserError(f"{where}: attention={kind!r} is unknown{nearest(kind, ATTENTIONS)}")
    family = replace(ADAPTED, base=base, attention="full" if kind == "full" else "prefix_causal")
    config = _make_config(family, source["base_config"], where)
    shared = target if source["share_embedding"] else None
    if source["share_embedding"]:
        sizes = config.vocab_size, config.hidden_size
        if target is None or sizes != target.embedding_VD.shape:
            made = f"made for target {source.get('target')!r} (embedding {sizes})"
            raise UserError(f"{where}: {made}: pass that target")
        names = embedding_names(_skeleton(base, config, where))
        tensors |= dict(zip(names, (target.embedding_VD, target.head_weight_VD), strict=True))
    with nullcontext() if base in BASES else refuse_on_error(where, "masked_lm"):
        model = _fill(family, config, tensors, where)
    family = _with_ids(family, source, None, config.vocab_size, where)
    network = MaskedLM(model, family, source, shared)
    if base not in BASES:
        check_opened(network, where)
    return network


def from_config(
    values: Mapping[str, Any], where: str = "config.json", dtype: torch.dtype = torch.float32
) -> MaskedLM:
    """A network of a published family with random weights, from its config.json. Raises UserError
    for no known family, or a value that does not fit."""
    family = family_of(values, where)
    config = _make_config(family, values, where)
    options = {"dtype": dtype, "attn_implementation": register()}
    with in_one_line(where):
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    family = _with_ids(family, values, None, config.vocab_size, where)
    return MaskedLM(model, family, dict(values))


def _make_config(family: Family, values: Mapping[str, Any], where: str) -> Any:
    """Their config.json as transformers' config, without keys that only their own code reads."""
    kept = {key: value for key, value in values.items() if key not in _LOADING}
    with in_one_line(where):
        return getattr(transformers, family.base).config_class(**kept)


def _skeleton(base: str, config: Any, where: str) -> Any:
    """The architecture on the meta device."""
    with in_one_line(where), torch.device("meta"):
        return getattr(transformers, base)(config)


def _with_ids(
    family: Family, values: Mapping[str, Any], folder: Path | None, vocab_size: int, where: str
) -> Family:
    """The family with this checkpoint's mask."""
    mask = values.get("mask_token_id")
    if mask is None and folder is not None:
        mask = _tokenizer_mask(folder)
    if mask is None:
        mask = family.mask_token_id
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise UserError(f"{where}: mask_token_id={mask!r} is not within 0..{vocab_size - 1}")
    return replace(family, mask_token_id=mask)


def _tokenizer_mask(folder: Path) -> int | None:
    """The id of the mask token that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    values = read_object(path) if path.is_file() else {}
    named, added = values.get("mask_token"), values.get("added_tokens_decoder")
    text = named.get("content") if isinstance(named, dict) else named
    for index, token in (added if isinstance(added, dict) else {}).items():
        if isinstance(token, dict) and text is not None and token.get("content") == text:
            return int(index)
    return None


def _fill(family: Family, config: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The transformers model, in fp32, with exactly these tensors, under transformers' names."""
    empty = _skeleton(family.base, config, where)
    expected = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    embedding, head = embedding_names(empty)
    if config.tie_word_embeddings:
        del expected[head]
        own = tensors.pop(head, None)
        if own is not None and embedding in tensors and not torch.equal(own, tensors[embedding]):
            name = family.theirs(head)
            raise UserError(f"{where}: {name!r} differs from the embedding that it is tied to")
    held = {family.theirs(name): tensor for name, tensor in tensors.items()}
    check_shapes(held, {family.theirs(n): shape for n, shape in expected.items()}, where)
    quiet_loading()
    options = {"dtype": torch.float32, "attn_implementation": register()}
    with in_one_line(where):
        return getattr(transformers, family.base).from_pretrained(
            None, config=config, state_dict=tensors, **options
        )
