"""The arguments of transformers' `generate`, and an error for those that speculative decoding can't
honour."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from specalign.common.errors import UserError

_PREPARED = {"attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position"}  # fmt: skip
"""What `generate` itself prepares."""
_RETURNED = ("output_hidden_states", "output_attentions")
"""What is returned with `return_dict_in_generate` only."""
_OTHER_CHOICE = ("penalty_alpha", "dola_layers", "force_words_ids", "constraints")
"""Settings that choose tokens neither greedily nor by sampling from processed logits."""
_OTHER_DRAFTER = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "speculation_type")
"""Settings for other drafters."""
_STATEFUL = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "DiaEOSDelayPatternLogitsProcessor": "",
    "HiggsAudioV2DelayPatternLogitsProcessor": "",
}
"""Stateful processors of transformers, and the setting that adds each; empty: none does."""


def arguments_of_generate(model: Any, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of the model's running `generate`, found on the stack below `frame`: it passes
    neither streamer nor assistant on.

    Raises:
        UserError: there is none.
    """
    while frame is not None:
        if frame.f_code.co_name == "generate" and frame.f_locals.get("self") is model:
            given = dict(frame.f_locals)
            return given.pop("kwargs", {}) | given
        frame = frame.f_back
    raise UserError(
        "custom_generate: call it through model.generate(custom_generate=…), in the same thread"
    )


def check_call(
    model: Any,
    asked: Mapping[str, Any],
    config: Any,
    processors: Any,
    inputs: Mapping[str, Any],
    ids_BL: Tensor,
) -> None:
    """Raises UserError for what speculative decoding can't honour.

    Args:
        asked: from `arguments_of_generate`.
        inputs: what `generate` would pass to the model besides the tokens.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UserError(
            f"{type(model).__name__}: reads a prompt with an encoder; give a decoder-only model"
        )
    if (config.num_beams or 1) > 1:
        raise UserError(
            f"num_beams={config.num_beams}: drafts are verified against one text; leave num_beams "
            "at 1"
        )
    if name := next(
        (name for name in _OTHER_CHOICE if getattr(config, name, None) not in (None, 0, [])), ""
    ):
        raise UserError(
            f"{name}: drafts are verified against greedy choices or samples; leave it out"
        )
    drafters = {"assistant_model": asked.get("assistant_model")}
    drafters |= {name: getattr(config, name, None) for name in _OTHER_DRAFTER}
    if name := next((name for name, value in drafters.items() if value), ""):
        raise UserError(f"{name}: `drafter` takes its place; leave it out")
    for name in _RETURNED:
        if config.return_dict_in_generate and getattr(config, name, None):
            raise UserError(f"{name}: would include rejected drafts; leave it out")
    for one in _flatten(processors):
        if name := next((k.__name__ for k in type(one).__mro__ if k.__name__ in _STATEFUL), ""):
            key = _STATEFUL[name]
            key = key if getattr(config, key, None) not in (None, 1) else "logits_processor"
            raise UserError(
                f"{key}: {name} depends on the order of its calls, which drafts change; leave it "
                "out"
            )
    if any(asked.get(name) is not None for name in ("cache", "past_key_values")):
        raise UserError("past_key_values (cache): is neither read nor filled; leave it out")
    if "Quantized" in type(inputs.get("cache")).__name__:
        raise UserError("cache_implementation: quantized keys would change the text; leave it out")
    for name, value in inputs.items():
        if name not in (*_PREPARED, *_RETURNED) and not _changes_nothing(
            model, ids_BL, name, value
        ):
            raise UserError(f"{name}: only tokens and attention_mask are taken as input")
    if ids_BL.shape[1] == 0:
        raise UserError("input_ids: there is no token to continue")
    if asked.get("synced_gpus"):
        raise UserError(
            "synced_gpus: the number of forward passes differs between processes; leave it out"
        )
    if asked.get("streamer") is not None and len(ids_BL) > 1:
        raise UserError(f"streamer: takes one text, not {len(ids_BL)}")


def _flatten(processors: Iterable[Any]) -> Iterator[Any]:
    """The processors, nested lists included."""
    for one in processors:
        if isinstance(one, list | tuple):
            yield from _flatten(one)
        else:
            yield one


def _changes_nothing(model: Any, ids_BL: Tensor, name: str, value: Any) -> bool:
    """Whether an input is empty, or zeros that mark every token as text (multimodal processors
    write them) and change nothing."""
    if _empty(value):
        return True
    types = (
        isinstance(value, Tensor)
        and name.endswith("token_type_ids")
        and value.shape == ids_BL.shape
    )
    return types and not bool(value.any()) and _same_without(model, ids_BL[:1, :8], name)


def _empty(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 0
    if isinstance(value, Mapping):
        return all(map(_empty, value.values()))
    return (
        value is None
        or value is False
        or (isinstance(value, list | tuple) and all(map(_empty, value)))
    )


@torch.no_grad()
def _same_without(model: Any, ids_1L: Tensor, name: str) -> bool:
    """Whether zeros as this input leave the model's logits bit-identical."""
    before, training = model.config._attn_implementation, model.training
    try:
        model.set_attn_implementation("eager")
        model.eval()
        zeros = {name: torch.zeros_like(ids_1L)}
        return torch.equal(*(model(input_ids=ids_1L, **more).logits for more in (zeros, {})))
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def masks_of(ids_BL: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Which tokens are not padding, (B, L) bool.

    Raises:
        UserError: padding on the right, a text of padding only, unusual positions, or a wrong
            shape.
    """
    mask_BL, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    # of a mask of ones `generate` hands on positions alone
    for given, most in ((mask_BL, 2), (positions, 3)):
        if given is not None and not (
            given.dim() <= most
            and given.shape[-1:] == ids_BL.shape[1:]
            and given.shape[-2:-1] in (ids_BL.shape[:1], (1,))
        ):
            raise UserError(
                f"attention_mask (position_ids): shape {tuple(given.shape)}, but input_ids have "
                f"{tuple(ids_BL.shape)}"
            )
    mask_BL = torch.ones_like(ids_BL) if mask_BL is None else mask_BL.expand_as(ids_BL)
    mask_BL = mask_BL.bool()
    if bool((mask_BL[:, 1:] < mask_BL[:, :-1]).any()):
        raise UserError("attention_mask: pad on the left (padding_side='left')")
    if not bool(mask_BL[:, -1].all()):
        raise UserError("attention_mask: a text is only padding")
    # a model of images and text has several positions of each token, which are the same for text
    if positions is not None and not bool(
        ((positions == mask_BL.long().cumsum(1) - 1) | ~mask_BL).all()
    ):
        raise UserError(
            "position_ids: must be 0, 1, 2, … from a text's first token; leave them out"
        )
    return mask_BL
