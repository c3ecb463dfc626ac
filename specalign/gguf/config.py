"""Completes the config that transformers makes of a GGUF file.

transformers' reader knows a few keys of each architecture and silently leaves the class's default
for the others. The meaning of the keys is llama.cpp's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specalign.common.errors import UserError
from specalign.gguf.header import EMBEDDING, HINT, ROPE_FACTORS, Header
from specalign.gguf.tokenizer import special_id

_VALUES = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""GGUF keys and the config attributes they set."""


def complete_config(path: Path, header: Header, config: Any) -> None:
    """Write what the file says into the config, before the model is built.

    Raises:
        UserError: a partial rotary width, which no config of these architectures expresses.
    """
    config.vocab_size = header.tensors[EMBEDDING].shape[0]
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        setattr(config, f"{name}_token_id", special_id(header.values, key))
    for key, attribute in _VALUES.items():
        value = header.get(key)
        if value and hasattr(config, attribute):
            # files store float32; the shortest decimal that rounds to it is the published value
            is_float = isinstance(value, float)
            setattr(config, attribute, float(str(np.float32(value))) if is_float else value)
    heads = header.get("attention.head_count")
    head_dim = header.get("attention.key_length") or header.get("embedding_length") // heads
    if "head_dim" in vars(config):  # not where it is a property
        config.head_dim = head_dim
    width = header.get("rope.dimension_count") or head_dim
    if width != head_dim:
        key = f"{header.architecture}.rope.dimension_count"
        raise UserError(f"{path}: {key}={width}: partial rotary width of {head_dim}; {HINT}")
    _complete_rope(path, header, config.rope_parameters, config.max_position_embeddings)


def _complete_rope(path: Path, header: Header, rope: dict[str, Any], context: int) -> None:
    base = header.get("rope.freq_base")
    if base:
        rope["rope_theta"] = float(base)
    stored = header.tensors.get(ROPE_FACTORS)
    if stored is not None:  # Llama 3.1's; a longrope that is the same at every length
        factors = np.fromfile(path, "<f4", stored.shape[0], offset=stored.start)
        per_frequency = (factors * np.float32(header.rope_scale)).tolist()
        rope |= {
            "rope_type": "longrope", "short_factor": per_frequency, "long_factor": per_frequency,
            "attention_factor": 1.0, "original_max_position_embeddings": context,
        }  # fmt: skip
    elif header.rope_scale != 1:
        rope |= {"rope_type": "linear", "factor": header.rope_scale}
