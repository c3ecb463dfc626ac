"""Rotary tables of other engines' drafters: `rope_parameters`, read and written."""

import torch
from torch import Tensor
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.common.text import short
from specalign.lm.inspection.keys import RotaryTable
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_SAME = 1e-4
"""The largest difference of two tables that is rounding."""


def read_rotary(
    inner: JsonObject, width: int, target: Target
) -> tuple[list[JsonObject], JsonObject]:
    """`BlockConfig.rotary` for layers with heads of this width, empty if the target's own tables
    are the same, and their `rope_parameters`. `inner`: a Qwen3 config's values; partial rotary is
    ignored, as by Qwen3's layers in transformers. Raises UserError for tables that change with the
    text's length, or a wrong type."""
    given = {key: inner[key] for key in _KEYS if inner.get(key) is not None}
    written = short(given.get("rope_parameters", given.get("rope_scaling")))
    with in_one_line(f"invalid rope_parameters={written}"):
        config = Qwen3Config(head_dim=width, num_attention_heads=1, hidden_size=width, **given)
        module = Qwen3RotaryEmbedding(config)
    rope: JsonObject = dict(config.rope_parameters or {})
    kind = str(rope.get("rope_type", "default"))
    positions = torch.tensor([[0, 1, 7, 90, min(1000, target.context_limit - 1)]])
    theirs = module(torch.zeros(1), positions)
    if theirs[0].shape[-1] != width:
        part = f"{theirs[0].shape[-1]} of {width} dims"
        raise UserError(f"rope_parameters: partial rotary ({part}) is not supported")
    growing = kind in ("dynamic", "longrope")  # they differ in long texts only
    target_rope = getattr(target.config, "rope_parameters", None) or {}
    own = _target_tables(target, positions)
    if own is not None and (not growing or target_rope.get("rope_type") == kind):
        pairs = list(zip(own, theirs, strict=True))
        if all(a.shape == b.shape and float((a - b).abs().max()) < _SAME for a, b in pairs):
            return [], rope
    if growing:
        why = "changes with the text's length and is not the target's own"
        raise UserError(f"rope_parameters: rope_type={kind!r} {why}")
    table = RotaryTable("half", 0, tuple(module.inv_freq.tolist()), float(module.attention_scaling))
    return [table.entry()], rope


@torch.no_grad()
def _target_tables(target: Target, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """cos and sin of the target's own module, fp32; None if it has none that is called so."""
    try:
        x = torch.zeros(1, 1, target.hidden_size, device=target.device)
        cos, sin = target.body.rotary_emb(x, positions.to(target.device))
        return cos.float().cpu(), sin.float().cpu()
    except Exception:  # modules of this name are called in many ways
        return None


def write_rotary(drafter: BlockDrafter, name: str = "") -> JsonObject:
    """`rope_parameters` of this drafter's rotary tables. Raises UserError, which names the format
    `name`, if no format has such tables."""
    c = drafter.config
    if (published := c.extra.get("rope_parameters")) is not None:  # imported from another engine
        return dict(published)
    if c.rotaries:
        theta = _find_theta(c)
        if theta is None:
            raise UserError(f"--format {name}: needs full NeoX-style RoPE with a single base")
        return {"rope_type": "default", "rope_theta": theta}
    found = dict(getattr(drafter.target.config, "rope_parameters", None) or {})
    by_kind = [value for value in found.values() if isinstance(value, dict)]  # of kinds of layers
    if by_kind:
        found = dict(found.get("full_attention") or by_kind[0])
    # sections for images: equal in text, and vLLM refuses drafters that have them
    found = {key: value for key, value in found.items() if not key.startswith("mrope_")}
    theta = float(found.get("rope_theta") or c.rope_theta)
    return {"rope_type": "default", **found, "rope_theta": theta}


def _find_theta(config: BlockConfig) -> float | None:
    """The base if every layer rotates whole heads in halves by base^(−2i/d)."""
    first = config.rotaries[0]
    count = len(first.inv_freq)
    if any(r != first for r in config.rotaries) or not first.full(config.head_dim) or count < 2:
        return None
    theta = first.inv_freq[1] ** (-config.head_dim / 2)
    plain = [theta ** (-2 * i / config.head_dim) for i in range(count)]
    fits = all(abs(a / b - 1) < 1e-4 for a, b in zip(first.inv_freq, plain, strict=True))
    return theta if fits else None
