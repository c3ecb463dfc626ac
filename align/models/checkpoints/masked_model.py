"""The transformers model of a masked-diffusion language model, from a config and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from align.common.errors import UserError, in_one_line
from align.common.schema import read_object
from align.models.families import Family, family_of
from align.models.masked_lm import MaskedLM
from align.target.inspection.text_model import embedding_names
from align.target.interface import register
from align.target.opening import quiet_loading

_LOADING = {
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
}
"""Keys of a config.json that describe loading, not the network."""


def from_config(
    values: Mapping[str, Any], where: str = "config.json", dtype: torch.dtype = torch.float32
) -> MaskedLM:
    """A network of a published family with random weights, from its config.json.

    Raises:
        UserError: no known family, or a value that does not fit.
    """
    family = family_of(values, where)
    config = config_of(family.base, renamed(family, values), where)
    with in_one_line(where):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    return MaskedLM(model, with_ids(family, values, None, config.vocab_size, where), dict(values))


def renamed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Their config.json under transformers' names, without keys that only their own code reads."""
    if family.config:
        return {ours: values[key] for key, ours in family.config.items() if values.get(key) is not None}
    return {key: value for key, value in values.items() if key not in _LOADING}


def config_of(base: str, values: Mapping[str, Any], where: str) -> Any:
    with in_one_line(where):
        return getattr(transformers, base).config_class(
            **{k: v for k, v in values.items() if k not in _LOADING}
        )


def skeleton(base: str, config: Any, where: str) -> Any:
    """The architecture on the meta device."""
    with in_one_line(where), torch.device("meta"):
        return getattr(transformers, base)(config)


def with_ids(
    family: Family, values: Mapping[str, Any], folder: Path | None, vocab_size: int, where: str
) -> Family:
    """The family with this checkpoint's mask and block."""
    mask = values.get("mask_token_id")
    if mask is None and folder is not None:
        mask = _tokenizer_mask(folder)
    if mask is None:
        mask = family.mask_token_id
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise UserError(f"{where}: mask_token_id={mask!r} is not within 0..{vocab_size - 1}")
    block = family.block_size
    if family.attention == "block_causal":
        block = values.get("block_size", block)
        if type(block) is not int or block < 1:
            raise UserError(f"{where}: block_size={block!r} must be a whole number of at least 1")
    return replace(family, mask_token_id=mask, block_size=block)


def _tokenizer_mask(folder: Path) -> int | None:
    """The id of the mask token that tokenizer_config.json names."""
    path = folder / "tokenizer_config.json"
    values = read_object(path) if path.is_file() else {}
    named, added = values.get("mask_token"), values.get("added_tokens_decoder")
    text = named.get("content") if isinstance(named, dict) else named
    if text is None or not isinstance(added, dict):
        return None
    for index, token in added.items():
        if isinstance(token, dict) and token.get("content") == text and index.isdecimal():
            return int(index)
    return None


def filled(family: Family, config: Any, tensors: dict[str, Tensor], where: str) -> Any:
    """The transformers model, in fp32, with exactly these tensors, under transformers' names."""
    empty = skeleton(family.base, config, where)
    expected = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    embedding, head = embedding_names(empty)
    if config.tie_word_embeddings:
        del expected[head]
        own = tensors.pop(head, None)
        if own is not None and embedding in tensors and not torch.equal(own, tensors[embedding]):
            raise UserError(f"{where}: {family.theirs(head)!r} differs from the embedding that it is tied to")
    for name in sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{where}: its checkpoint misses {family.theirs(name)!r}")
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{where}: its checkpoint has an unknown tensor {family.theirs(name)!r}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{where}: {family.theirs(name)} has shape {tuple(tensors[name].shape)}, expected {tuple(shape)}"
            )
    quiet_loading()
    with in_one_line(where):
        return getattr(transformers, family.base).from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, attn_implementation=register()
        )
