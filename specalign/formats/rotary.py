"""The rotary tables of another engine's drafter: the target's own, or stored frequencies."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from specalign.common.errors import UserError, in_one_line
from specalign.common.text import say, short
from specalign.lm.inspection.keys import Rotary
from specalign.lm.model import Target

KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings")
_PARTIAL = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
"""Keys that Qwen3's layers in transformers, in which drafters are trained, ignore; vLLM's follow
them."""
_SAME = 1e-4
"""The largest difference of two tables that is rounding."""


def rotary_entries(
    inner: dict[str, Any], width: int, target: Target, where: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`BlockConfig.rotary` for these layers, empty if the target's own tables are the same, and
    their `rope_parameters`.

    Args:
        inner: a Qwen3 config's values. width: of a head.

    Raises:
        UserError: tables that change with the text's length, a wrong base or type.
    """
    _check_base(inner, where)
    given = {key: inner[key] for key in KEYS if inner.get(key) is not None}
    written = short(given.get("rope_parameters", given.get("rope_scaling")))
    with in_one_line(f"{where}: rope_parameters={written} make no rotary tables"):
        config = Qwen3Config(head_dim=width, num_attention_heads=1, hidden_size=width, **given)
        module = Qwen3RotaryEmbedding(config)
    rope: dict[str, Any] = dict(config.rope_parameters or {})
    kind = str(rope.get("rope_type", "default"))
    positions = torch.tensor([[0, 1, 7, 90, min(1000, target.context_limit - 1)]])
    theirs = module(torch.zeros(1), positions)
    if theirs[0].shape[-1] != width:
        raise UserError(
            f"{where}: rope_parameters turn {theirs[0].shape[-1]} of a head's {width} numbers; "
            "here all of "
            "them are turned"
        )
    own = _target_tables(target, positions, width)
    growing = kind in ("dynamic", "longrope")
    target_rope = getattr(target.config, "rope_parameters", None) or {}
    if growing and target_rope.get("rope_type") != kind:  # they differ in long texts only
        own = None
    if own is not None and all(
        (a - b).abs().max() < _SAME for a, b in zip(own, theirs, strict=True)
    ):
        return [], rope
    if growing:
        raise UserError(
            f"{where}: rope_parameters: rope_type={kind!r} changes with the length of the text and "
            "is not the "
            "target's own"
        )
    table = Rotary("half", 0, tuple(module.inv_freq.tolist()), float(module.attention_scaling))
    return [table.entry()], rope


def scaled_entry(theta: float, factors: Tensor) -> dict[str, Any]:
    """An entry of `BlockConfig.rotary`: frequencies of the base `theta`, divided by the factors (d
    / 2)."""
    steps = torch.arange(len(factors), dtype=torch.float64) / len(factors)
    frequencies = theta**-steps / factors.double()
    return Rotary("half", 0, tuple(frequencies.tolist()), 1.0).entry()


def _check_base(inner: dict[str, Any], where: str) -> None:
    """Raises UserError for a base that is no positive number; warns about partial rotary, which is
    ignored."""
    for place in (inner, inner.get("rope_scaling"), inner.get("rope_parameters")):
        if not isinstance(place, dict):
            continue
        for name in _PARTIAL:
            if place.get(name) not in (None, 1):
                _warn_partial(where, f"{name}={short(place[name])}")
        theta = place.get("rope_theta")
        if theta is not None and not (type(theta) in (int, float) and 0 < theta < 1e38):
            raise UserError(f"{where}: rope_theta={short(theta)}: must be a finite number above 0")


@cache
def _warn_partial(where: str, setting: str) -> None:
    """Once."""
    why = "ignored, as by Qwen3's layers in transformers, which turn whole heads; vLLM's turn that share"
    say(f"note: {where}: {setting} is {why}", error=True)


@torch.no_grad()
def _target_tables(target: Target, positions: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    """cos and sin of the target's own module, fp32; None if it has none of that width."""
    try:
        x = torch.zeros(1, 1, target.hidden_size, device=target.device)
        cos, sin = target.body.rotary_emb(x, positions.to(target.device))
    except Exception:  # modules of this name are called in many ways
        return None
    if not cos.shape == sin.shape == (1, positions.shape[1], width):
        return None
    return cos.float().cpu(), sin.float().cpu()
