"""Refuse what `generate` is asked for and drafts can't honour."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}  # fmt: skip
"""What `generate` adds itself."""
_SHOWN = ("output_hidden_states", "output_attentions")
"""Only returned with `return_dict_in_generate`."""
_TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Of models that also take images; 0 = text."""
_OTHER_CHOICE = ("penalty_alpha", "dola_layers", "force_words_ids", "constraints")
"""Settings that choose tokens neither greedily nor by sampling."""
_OTHER_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")


def check_call(model: Any, config: Any, model_kwargs: dict[str, Any], input_ids: Tensor) -> Tensor:
    """Which tokens of each text are no padding, (B, L). Raises ValueError for what can't be
    honoured."""
    _check_settings(model, config)
    images = "pixel_values" in inspect.signature(model.forward).parameters
    for name, value in model_kwargs.items():
        text = (
            images and name in _TOKEN_TYPES and isinstance(value, Tensor) and not bool(value.any())
        )
        if name not in (*_PREPARED, *_SHOWN) and not text and not _is_empty(value):
            raise ValueError(
                f"{name}: only tokens and attention_mask are taken as input; leave it out"
            )
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if "Quantized" in type(cache).__name__:
            raise ValueError(f"{name}: is quantised, and drafts need exact keys; leave it out")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError(
                f"{name}: holds tokens, and every text is read from its start; leave it out"
            )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids: there is no token to continue")
    return _read_mask(
        model_kwargs.get("attention_mask"), model_kwargs.get("position_ids"), input_ids
    )


def _check_settings(model: Any, config: Any) -> None:
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: drafts need one text; leave num_beams at 1"
        )
    for name in _OTHER_CHOICE:
        if getattr(config, name, None) not in (None, 0, []):
            raise ValueError(
                f"{name}: drafts are checked against greedy choices or samples; leave it out"
            )
    for name in _OTHER_DRAFTS:
        if getattr(config, name, None):
            raise ValueError(f"{name}: asks for other drafts than this drafter's; leave it out")
    if getattr(model, "_is_stateful", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__}: its states can't be taken back, so drafts can't be checked"
        )
    for name in _SHOWN:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise ValueError(f"{name}: would contain states of rejected drafts; leave it out")


def _read_mask(mask: Tensor | None, positions: Tensor | None, input_ids: Tensor) -> Tensor:
    """`attention_mask` (B, L), and `position_ids` (B, L) or several kinds of them, (n, B, L)."""
    rows, length = input_ids.shape
    for given, most in ((mask, 2), (positions, 3)):
        if given is None:
            continue
        shape = tuple(given.shape)
        if not 2 <= len(shape) <= most or shape[-1] != length or shape[-2] not in (rows, 1):
            raise ValueError(
                f"attention_mask (position_ids): has the shape {shape}, input_ids "
                f"{(rows, length)}; give one "
                "number a token"
            )
    mask_BL = torch.ones_like(input_ids) if mask is None else mask.expand_as(input_ids)
    mask_BL = mask_BL.bool()
    if not bool(mask_BL.any(dim=1).all()):
        raise ValueError("attention_mask: a text has no token but padding")
    if bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
        raise ValueError(
            "attention_mask: padding after tokens; pad on the left (padding_side='left')"
        )
    if positions is not None and not bool(((positions == mask_BL.cumsum(1) - 1) | ~mask_BL).all()):
        raise ValueError(
            "position_ids: only 0, 1, 2, … from a text's first token on; leave them out"
        )
    return mask_BL


def check_length(model: Any, longest: int) -> None:
    """Raises ValueError if a text may reach the length at which the model's rotary tables change:
    the cache holds keys under the old ones."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    for group in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        kind, most = group.get("rope_type"), config.max_position_embeddings
        if kind == "longrope":
            most = group.get("original_max_position_embeddings", most)
        if kind in ("dynamic", "longrope") and longest > most:
            raise ValueError(
                f"max_length={longest}: the model's rotary tables change at {most} tokens "
                f"({kind}), and drafts "
                "would change the text; lower max_new_tokens"
            )


def find_packed_part(model: Any) -> str:
    """The first part that torch.ao.quantization rounds by one scale for all rows, so that drafts
    change the logits of the rows next to them; empty = none."""
    named = model.named_modules()
    return next((name for name, part in named if "quantized.dynamic" in type(part).__module__), "")


def _is_empty(value: Any) -> bool:
    """Whether an input holds nothing, as `generate` prepares for a model of images without any."""
    if isinstance(value, Tensor):
        return value.numel() == 0
    if isinstance(value, dict):
        return all(map(_is_empty, value.values()))
    return (
        value is None
        or value is False
        or (isinstance(value, list | tuple) and all(map(_is_empty, value)))
    )
