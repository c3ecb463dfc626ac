"""Our attention as transformers' models call it, through its documented interface."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from specalign.lm.attention import biased_attention, grouped_attention
from specalign.lm.cache import Parts
from specalign.lm.masks import grouped_mask, note_attended, own_mask

NAME = "grouped_attention"
OWN = "eager"
"""A model's own attention, which every architecture has."""
_HARMLESS = {
    "position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


def _interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Parts,
    value: Tensor | Parts,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name, given in kwargs.items():
        if isinstance(given, Tensor) and name not in _HARMLESS:
            raise NotImplementedError(f"its attention takes {name!r}")  # which is ignored here
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool = False
    ) -> Tensor:
        if softcap is None and s_aux is None:
            return grouped_attention(q, k, v, mask, scale, causal)
        return biased_attention(q, k, v, mask, scale, softcap, s_aux)

    if isinstance(key, Parts):  # several requests in one forward pass, each with its own past
        assert isinstance(value, Parts) and attention_mask is not None
        masks: Any = attention_mask.parts  # type: ignore[attr-defined]
        queries = query.split(key.widths, dim=2)
        requests = zip(queries, key.tensors, value.tensors, masks, strict=True)
        out = torch.cat([attend(q, k, v, mask) for q, k, v, mask in requests], dim=2)
    else:
        assert isinstance(value, Tensor)
        note_attended(query.shape[1] // key.shape[1])
        causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
        out = attend(query, key, value, attention_mask, causal)
    return out.transpose(1, 2).contiguous(), None


def register() -> str:
    """Register the function with transformers and return its name."""
    AttentionInterface.register(NAME, _interface)
    AttentionMaskInterface.register(NAME, grouped_mask)
    AttentionMaskInterface.register(OWN, own_mask)
    return NAME


def install(model: PreTrainedModel, own: bool = False) -> None:
    """Make a model attend through this file; `own`: through its own eager attention, with our
    masks. A model that takes no other attention silently keeps its own."""
    register()
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model.set_attn_implementation(OWN if own else NAME)
    finally:
        logger.setLevel(level)
