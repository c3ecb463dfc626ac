"""What a GGUF file says of caps, norms, windows and scores that transformers' reader passes over, and whether the reader took all tensors.

The reader leaves the class's defaults where it knows no key: Gemma 2's caps, the eps of Falcon and Nemotron, StarCoder 2's window. The model would run, and
be another one. The meanings are llama.cpp's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from align.common.errors import UserError
from align.gguf.header import TAKE_FOLDER, Header

_TAKEN = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
}
"""Keys of a file, and their names in configs."""
_SIZES = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "context_length": "n_positions",
}
"""Sizes that the weights have: widths of experts, learned positions."""
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B, whose scores are scaled by the width for each head, not by that of a key."""


def take_sizes(header: Header, config: Any) -> None:
    """Write the sizes that the file gives into the config that the reader made, before the model is built."""
    for key, name in _SIZES.items():
        if (value := header.get(key)) and hasattr(config, name):
            setattr(config, name, value)
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and pad >= config.vocab_size:  # the class's own; the file's vocabulary is smaller
        config.pad_token_id = None


def take_settings(header: Header, config: Any) -> None:
    """Write what the file says into the config that the reader made."""
    for key, names in _TAKEN.items():
        value = header.get(key)
        name = next((n for n in names if hasattr(config, n)), None)
        if value and name is not None:  # 0 says that there is none
            setattr(config, name, published(value))
    if hasattr(config, "query_pre_attn_scalar"):
        largest = config.num_hidden_layers == _LARGEST.get(header.architecture)
        each = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = each if largest else config.head_dim
    if header.architecture == "gemma3" and not header.get("attention.sliding_window"):
        config.layer_types = ["full_attention"] * config.num_hidden_layers


def published(value: Any) -> Any:
    """A file keeps fp32; the shortest decimal that rounds to it is the published value."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def check_whole(
    path: Path,
    header: Header,
    missing: list[str],
    others: list[str],
    tensors: Mapping[str, Any],
    layers: int,
) -> None:
    """Raises UserError where the file lacks weights of the model, or holds some that are not in it. `others`: weights that it has in
    another shape; `tensors`: the model's, each once; `layers`: how many it has, as a file's blocks behind them draft and are left out."""
    if missing:
        more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"{path}: the file lacks {missing[0]!r} of a {header.architecture} model{more}")
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise UserError(
            f"{path}: {others[0]!r}{more}: of another shape than in the {header.architecture} model that transformers makes of the "
            f"file: {TAKE_FOLDER}"
        )
    given = {n: math.prod(s) for n, s in header.shapes.items() if not n.startswith("rope_")}
    behind = {n for n in given if n.startswith("blk.") and int(n.split(".")[1]) >= layers}
    numbers, taken = sum(given[n] for n in given.keys() - behind), sum(t.numel() for t in tensors.values())
    if numbers != taken:
        raise UserError(
            f"{path}: its tensors hold {numbers:,} numbers, the {header.architecture} model that transformers makes of them {taken:,}: some "
            f"would be left out: {TAKE_FOLDER}"
        )
