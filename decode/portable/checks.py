"""What a call of `generate` asks for that drafts can't honour: one line each."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

_PREPARED = {
    "attention_mask",
    "position_ids",
    "cache",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}
"""What `generate` makes by itself for a text of tokens."""
_SHOWN = ("output_hidden_states", "output_attentions")
"""What is returned beside the text, and without `return_dict_in_generate` is not."""
_KINDS = {"token_type_ids", "mm_token_type_ids"}
"""Where a model takes images too, which tokens stand for them; 0 = text."""


def check_call(model: Any, config: Any, model_kwargs: dict[str, Any], input_ids: Tensor) -> Tensor:
    """Which tokens of each text are no padding, (B, L). Raises ValueError for what can't be honoured."""
    if (config.num_beams or 1) > 1:
        raise ValueError(
            f"num_beams={config.num_beams}: drafts are checked against one text; leave num_beams at 1"
        )
    if name := other_way(config):
        raise ValueError(f"{name}: drafts are checked against greedy choices or samples; leave it out")
    if name := other_drafts(config):
        raise ValueError(f"{name}: asks for other drafts than this drafter's; leave it out")
    if getattr(model, "_is_stateful", False) or getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__}: its states can't be taken back, so drafts can't be checked"
        )
    for name in _SHOWN:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise ValueError(f"{name}: the states of rejected drafts are among them; leave it out")
    images = "pixel_values" in inspect.signature(model.forward).parameters
    for name, value in model_kwargs.items():
        text = images and name in _KINDS and isinstance(value, Tensor) and not bool(value.any())
        if name not in (*_PREPARED, *_SHOWN) and not text and not _empty(value):
            raise ValueError(f"{name}: only tokens and attention_mask are taken as input; leave it out")
    for name in ("cache", "past_key_values"):
        held = model_kwargs.get(name)
        if "Quantized" in type(held).__name__:
            raise ValueError(
                f"{name}: is a quantised one, and drafts are checked with exact keys; leave it out"
            )
        if held is not None and held.get_seq_length() > 0:
            raise ValueError(
                f"{name}: holds tokens already; every text is read from its beginning, leave it out"
            )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids: there is no token to continue")
    mask = model_kwargs.get("attention_mask")
    positions = model_kwargs.get("position_ids")  # (B, L), or one such table for each kind of position
    for given, most in ((mask, 2), (positions, 3)):  # of a mask of ones `generate` hands on positions alone
        if given is not None and not (
            given.dim() <= most
            and given.shape[-1:] == input_ids.shape[1:]
            and given.shape[-2:-1] in (input_ids.shape[:1], (1,))
        ):
            raise ValueError(
                f"attention_mask (position_ids): has the shape {tuple(given.shape)}, input_ids {tuple(input_ids.shape)}; give one number "
                "a token"
            )
    mask_BL = torch.ones_like(input_ids) if mask is None else mask.expand_as(input_ids)
    mask_BL = mask_BL.bool()
    if not bool(mask_BL.any(dim=1).all()):
        raise ValueError("attention_mask: a text has no token but padding")
    if bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
        raise ValueError(
            "attention_mask: padding stands behind tokens; pad on the left (padding_side='left')"
        )
    if positions is not None and not bool(((positions == mask_BL.cumsum(1) - 1) | ~mask_BL).all()):
        raise ValueError(
            "position_ids: others than 0, 1, 2, … from a text's first token are not taken; leave them out"
        )
    return mask_BL


def check_length(model: Any, longest: int) -> None:
    """Raises ValueError where a text of `longest` tokens may reach the length at which the model's rotary tables change: a call's drafts
    would change them for the tokens before, and its cache holds keys under the old ones."""
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    for rope in (given, *(group for group in given.values() if isinstance(group, dict))):
        if (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            most = config.max_position_embeddings
            most = rope.get("original_max_position_embeddings", most) if kind == "longrope" else most
            if longest > most:
                raise ValueError(
                    f"max_length={longest}: the model's rotary tables change at {most} tokens ({kind}), and drafts would change the text; "
                    "lower max_new_tokens"
                )


def packed_part(model: Any) -> str:
    """The first part of a model that torch.ao.quantization has made to round what it reads by one scale for all rows of a call, so that a
    row's numbers depend on the drafts beside it; empty = none."""
    named = model.named_modules()
    return next((name for name, part in named if "quantized.dynamic" in type(part).__module__), "")


def _empty(value: Any) -> bool:
    """Whether an input holds nothing, as those do that `generate` prepares for a model of images without any."""
    if isinstance(value, Tensor):
        return value.numel() == 0
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    return value is None or value is False if values is None else all(map(_empty, values))


def other_way(config: Any) -> str:
    """The setting that asks for another choice of tokens than greedy ones or samples from processed logits; empty = none."""
    asked = ("penalty_alpha", "dola_layers", "force_words_ids", "constraints")
    return next((name for name in asked if getattr(config, name, None) not in (None, 0, [])), "")


def other_drafts(config: Any) -> str:
    """The setting that asks `generate` for drafts of another kind; empty = none."""
    asked = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
    return next((name for name in asked if getattr(config, name, None)), "")
