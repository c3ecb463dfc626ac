"""Completes the config that transformers makes of a GGUF file.

transformers' reader knows a few keys of each architecture and silently leaves the class's default
for the others: Gemma 2's soft caps, Gemma 3's rotary scale, StarCoder 2's window, Phi-4-mini's
partial rotary width. The meaning of the keys is llama.cpp's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specalign.common.errors import UserError
from specalign.common.schema import JsonObject
from specalign.gguf.header import EMBEDDING, HINT, ROPE_FACTORS, Header, rope_scale
from specalign.gguf.tokenizer import special_id

_VALUES = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_eps",
        "norm_epsilon",
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.sliding_window": ("sliding_window",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "context_length": ("n_positions",),
}
"""GGUF keys and the config attributes they set, whichever the config has; 0 means none."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores are scaled by hidden_size / heads instead of head_dim."""


def complete_config(path: Path, header: Header, config: Any) -> None:
    """Write what the file says into the config, before the model is built.

    Raises:
        UserError: a partial rotary width that this architecture's config cannot express.
    """
    config.vocab_size = int(header.tensors[EMBEDDING].shape[1])
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        setattr(config, f"{name}_token_id", special_id(header.values, key))
    for key, names in _VALUES.items():
        value = header.get(key)
        attribute = next((name for name in names if hasattr(config, name)), None)
        if value and attribute is not None:
            setattr(config, attribute, _shortest_decimal(value))
    head_dim = _head_dim(header)
    if head_dim and "head_dim" in vars(config):  # not where it is a property
        config.head_dim = head_dim
    if hasattr(config, "query_pre_attn_scalar"):
        largest = config.num_hidden_layers == _LARGEST.get(header.architecture)
        per_head = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = per_head if largest else config.head_dim
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict):
        _complete_rope(path, header, rope, config.max_position_embeddings)


def _shortest_decimal(value: Any) -> Any:
    """Files store float32; the shortest decimal that rounds to it is the published value."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _head_dim(header: Header) -> int | None:
    heads = header.get("attention.head_count")
    if header.get("attention.key_length"):
        return int(header.get("attention.key_length"))
    return header.get("embedding_length") // heads if isinstance(heads, int) and heads else None


def _complete_rope(path: Path, header: Header, rope: JsonObject, context: int) -> None:
    by_layer_type = any(isinstance(group, dict) for group in rope.values())
    main = rope["full_attention"] if by_layer_type else rope
    base = header.get("rope.freq_base")
    if base:
        main["rope_theta"] = float(base)
    sliding_base = header.get("rope.freq_base_swa")
    if by_layer_type and sliding_base:
        rope["sliding_attention"]["rope_theta"] = float(sliding_base)
    factor = rope_scale(header)
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is not None:  # Llama 3.1's; a longrope that is the same at every length
        per_frequency = (stored.data * np.float32(factor)).tolist()
        main |= {
            "rope_type": "longrope", "short_factor": per_frequency, "long_factor": per_frequency,
            "attention_factor": 1.0, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif factor != 1:
        main |= {"rope_type": "linear", "factor": factor}
    width = header.get("rope.dimension_count")
    head_dim = _head_dim(header)
    if by_layer_type or not width or not head_dim:
        return
    if "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = width / head_dim
    elif width != head_dim:
        key = header.key("rope.dimension_count")
        raise UserError(f"{path}: {key}={width}: partial rotary width of {head_dim}; {HINT}")
