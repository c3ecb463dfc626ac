"""Refuse calls of `generate` that drafts can't honour."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

_PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}  # fmt: skip
"""Inputs that `generate` adds itself."""
_STATES = ("output_hidden_states", "output_attentions")
"""Only returned with `return_dict_in_generate`."""
_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Of models that also take images; 0 = text."""
_OTHER_METHODS = (
    "penalty_alpha", "dola_layers", "force_words_ids", "constraints", "prompt_lookup_num_tokens",
    "assistant_early_exit", "use_mtp",
)  # fmt: skip
"""Settings for other ways to choose tokens, or for other drafts."""


def check_call(
    model: PreTrainedModel,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    input_ids: Tensor,
) -> Tensor:
    """Which tokens of each text are not padding, (B, L). Raises ValueError for a setting or an
    input that drafts can't honour."""
    if (config.num_beams or 1) > 1:
        raise ValueError(f"num_beams={config.num_beams}: drafts need one text; set num_beams=1")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{type(model).__name__}: only decoder-only models are supported")
    states = _STATES if config.return_dict_in_generate else ()  # would be those of drafts too
    for name in (*_OTHER_METHODS, *states):
        if getattr(config, name, None) not in (None, 0, [], False):
            raise ValueError(f"{name}: is not supported with this drafter; leave it out")
    images = "pixel_values" in inspect.signature(model.forward).parameters
    for name, value in model_kwargs.items():
        zeros = isinstance(value, Tensor) and not bool(value.any())
        text = images and name in _TOKEN_TYPES and zeros
        if name not in (*_PREPARED, *_STATES) and not text and not _is_empty(value):
            raise ValueError(f"{name}: only tokens and attention_mask are taken as input")
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if "Quantized" in type(cache).__name__:
            raise ValueError(f"{name}: is quantised, and drafts need exact keys; leave it out")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(f"{name}: holds tokens, and texts are read from their start")
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids: there is no token to continue")
    return _read_mask(
        model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), input_ids
    )


def _read_mask(mask: Tensor | None, positions: Tensor | None, input_ids: Tensor) -> Tensor:
    """`attention_mask` (B, L), and `position_ids` (B, L) or several kinds of them, (n, B, L)."""
    rows, length = input_ids.shape
    for given, most in ((mask, 2), (positions, 3)):
        shape = (rows, length) if given is None else tuple(given.shape)
        if not 2 <= len(shape) <= most or shape[-1] != length or shape[-2] not in (rows, 1):
            shapes = f"has shape {shape}, input_ids {(rows, length)}"
            raise ValueError(f"attention_mask (position_ids): {shapes}")
    mask_BL = torch.ones_like(input_ids) if mask is None else mask.expand_as(input_ids)
    mask_BL = mask_BL.bool()
    if not bool(mask_BL.any(dim=1).all()):
        raise ValueError("attention_mask: a text is only padding")
    if bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
        raise ValueError("attention_mask: pad on the left (padding_side='left')")
    if positions is not None and not bool(((positions == mask_BL.cumsum(1) - 1) | ~mask_BL).all()):
        raise ValueError("position_ids: must count from a text's first token; leave them out")
    return mask_BL


def check_model(model: PreTrainedModel, longest: int) -> None:
    """Raises ValueError for a model whose cache or weights do not allow drafts, or whose rotary
    tables change below the length `longest`: the cache would hold keys under the old ones."""
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{type(model).__name__}: its state can't be rolled back after drafts")
    for name, part in model.named_modules():
        if "quantized.dynamic" in type(part).__module__:
            why = "with one scale for all rows, so that drafts would change the text"
            raise ValueError(f"{name}: is quantised by torch.ao.quantization, {why}")
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind = group.get("rope_type")
        most = config.max_position_embeddings if kind in ("longrope", "dynamic") else longest
        if kind == "longrope":
            most = group.get("original_max_position_embeddings", most)
        if longest > most:
            why = f"the model's rotary tables change at {most} tokens ({kind})"
            raise ValueError(f"max_length={longest}: {why}; lower max_new_tokens")


def _is_empty(value: Any) -> bool:
    """Whether an input holds nothing, as `generate` prepares for a model of images without any."""
    if isinstance(value, Tensor):
        return value.numel() == 0
    if isinstance(value, dict | list | tuple):
        return all(map(_is_empty, value.values() if isinstance(value, dict) else value))
    return value is None or value is False
