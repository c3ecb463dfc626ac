"""The shape of a fresh block drafter: which of the target's layers it reads and starts from, and sizes that are the target's
where it has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers.activations import ACT2FN

from align.common.errors import UserError
from align.config.drafter import DrafterConfig
from align.target.inspection.keys import Rotary, key_rotaries
from align.target.model import Target
from align.target.slabs import LayerShape

_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "block_ff_dim", "ffn_hidden_dim")
_EPS = (
    "rms_norm_eps",
    "layer_norm_epsilon",
    "layer_norm_eps",
    "norm_epsilon",
    "norm_eps",
    "layernorm_epsilon",
)


def tap_layers(num_layers: int, taps: int) -> list[int]:
    """DFlash's spread of tapped layers (arXiv 2602.06036): round(1 + i·(L−4)/(F−1)), i = 0..F−1."""
    if taps == 1:
        return [num_layers - 3]
    return [round(1 + i * (num_layers - 4) / (taps - 1)) for i in range(taps)]


def shared_layers(num_layers: int, layers: int) -> list[int]:
    """Target layers that a drafter starts from: the first, made for embeddings, the last, whose outputs the head reads, and as many
    between them, evenly.

    After 60 steps on SmolLM2 the drafter's argmax agreed with the target's on 17% of first positions with layers
    (0, 29), on 10% with (28, 29): an embedding has a two-hundredth of the size that a late layer expects.
    """
    if layers == 1:
        return [num_layers - 1]
    return [-(-i * (num_layers - 1) // (layers - 1)) for i in range(layers)]


class Sizes(Protocol):
    """What a fresh drafter's sizes are made of: a loaded target's, or those that its config.json says (align/planning/target_sizes.py)."""

    @property
    def spec(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def named_layers(target: Sizes, named: Sequence[int] | None) -> list[int]:
    """The target layers that a recipe names, -1 the last one; none for None.

    Raises:
        UserError: a layer that the target lacks.
    """
    count = target.num_layers
    if named is not None and not all(-count <= i < count for i in named):
        raise UserError(
            f"drafter.target_layers={list(named)}: target {target.spec!r} has the layers 0 to {count - 1} (-1 = the last one)"
        )
    return [i % count for i in named or ()]


def start_layers(target: Target, layers: int) -> list[int]:
    """Target layers that a drafter's layers start from: `shared_layers` of those that attend, of all where none does."""
    shapes = () if target.anatomy.repeats else target.anatomy.shapes
    attending = [i for i, shape in enumerate(shapes) if shape is not None]
    return _spread(attending, layers) if attending else shared_layers(target.num_layers, layers)


def _spread(layers: Sequence[int], count: int) -> list[int]:
    """`shared_layers` of a list of layers, the last ones again where they are too few."""
    if count > len(layers):
        return [*layers, *[layers[-1]] * (count - len(layers))]
    return [layers[i] for i in shared_layers(len(layers), count)]


def first_layers(target: Sizes, options: DrafterConfig) -> list[int]:
    """The target layers that a drafter starts from: those that the recipe names, else `shared_layers`.

    Raises:
        UserError: a layer that the target lacks, or more of them than it has.
    """
    if named := named_layers(target, options.target_layers):
        return named
    check_count(target, options.layers)
    return shared_layers(target.num_layers, options.layers)


def check_count(target: Sizes, layers: int) -> None:
    """Raises UserError for more layers than the target has."""
    if layers > target.num_layers:
        raise UserError(f"drafter.layers={layers}: target {target.spec!r} has {target.num_layers} layers")


def shared_keys(target: Target, options: DrafterConfig) -> tuple[list[int], list[Rotary]]:
    """The layers whose keys and values a drafter reads, by default those that `shared_layers` takes of all that can serve, and how
    each of them writes positions.

    Raises:
        UserError: layers without keys of their own, of several shapes, or with positions written in an unknown way.
    """
    named = named_layers(target, options.target_layers)
    shapes = [None if shape is None else shape._replace(indexer=0) for shape in target.anatomy.shapes]
    rotaries = key_rotaries(target)
    serving = [i for i, found in enumerate(rotaries) if isinstance(found, Rotary)]
    last = next((shapes[i] for i in reversed(named or serving)), None)
    same = [i for i in serving if shapes[i] == last]
    usual = shared_layers(target.num_layers, options.layers)
    chosen = named or (usual if set(usual) <= set(same) else _spread(same, options.layers) if same else [])
    bad = [i for i in chosen if i not in same]
    if not same or bad:
        which = f"layer {bad[0]} of target {target.spec!r}" if bad and same else f"target {target.spec!r}"
        attending = [found for found, shape in zip(rotaries, shapes, strict=False) if shape is not None]
        why = rotaries[bad[0]] if bad and same else [*rotaries[:1], *attending][-1]
        raise UserError(
            f"drafter.context=shared_kv: {which} has no keys and values that a drafter can share: "
            f"{why if isinstance(why, str) else 'they have another shape than those of other layers'} "
            f"(architecture {target.config.model_type!r}); use drafter.context=taps"
        )
    found = [rotaries[i] for i in chosen]
    return chosen, [r for r in found if isinstance(r, Rotary)]


@torch.no_grad()
def check_taps(target: Target, layers: Sequence[int]) -> None:
    """Raises UserError where what these layers write is not one hidden state for each token."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=target.device)
    found = target.forward(tokens, taps=layers, logits=False).taps_BLFD
    if found is None or tuple(found.shape) != (1, 2, len(layers), target.hidden_size):
        shares = any(isinstance(rotary, Rotary) for rotary in key_rotaries(target))
        raise UserError(
            f"drafter.context=taps: the layers of target {target.spec!r} do not write one hidden state for each token "
            f"(architecture {target.config.model_type!r}); "
            + (
                "use drafter.context=shared_kv"
                if shares
                else "a block drafter has nothing to read; --methods lookup needs none"
            )
        )


def own_shape(target: Target) -> LayerShape:
    """Heads of a drafter that makes keys of its own: the target's, else of the usual width."""
    heads, width = target.num_kv_heads, target.head_dim
    if target.anatomy.attends and width % 2 == 0 and target.num_heads % heads == 0:
        return LayerShape(heads, width, width)
    width = min(64, target.hidden_size // 2 * 2)
    heads = max(1, target.hidden_size // width)
    return LayerShape(heads, width, width)


def inner_size(target: Target) -> int:
    """Width of the feed-forward layers."""
    given = [getattr(target.config, name, None) for name in _INNER]
    given = [value[-1] if isinstance(value, list) and value else value for value in given]
    return next((v for v in given if isinstance(v, int) and v > 0), 4 * target.hidden_size)


def norm_eps(target: Target) -> float:
    given = [getattr(target.config, name, None) for name in _EPS]
    return next((float(v) for v in given if isinstance(v, float | int) and v >= 0), 1e-6)


def activation(target: Target) -> str:
    """The target's where it is a function alone; silu where it has weights or another name."""
    named = getattr(target.config, "hidden_act", None) or getattr(target.config, "hidden_activation", None)
    if not isinstance(named, str) or named not in ACT2FN:
        return "silu"
    made: Any = ACT2FN[named]
    return "silu" if isinstance(made, nn.Module) and list(made.parameters()) else named


def has_attention_bias(target: Target) -> bool:
    """Whether the layers' queries have a bias."""
    layers: Any = target.layers
    return any("self_attn.q_proj.bias" in dict(layer.named_parameters()) for layer in layers)


@torch.no_grad()
def own_tables(target: Target, width: int, rotaries: Sequence[Rotary]) -> bool:
    """Whether the target has one rotary module for all its layers, called with positions alone, in the plain layout and of this
    width, and it is what these layers do."""
    module = getattr(target.body, "rotary_emb", None)
    if module is None:
        return False
    x = torch.zeros(1, 3, target.hidden_size, dtype=target.dtype, device=target.device)
    positions = torch.arange(3, device=target.device)[None]
    try:
        cos, sin = module(x, positions)
        halves = [torch.equal(t[..., : width // 2], t[..., width // 2 :]) for t in (cos, sin)]
        if not all(halves) or not cos.shape == sin.shape == (1, 3, width):
            return False
    except Exception:  # modules of this name are called in many ways
        return False
    # a table may be scaled as a whole: keys have the scale, queries learn it
    each = [rotary.tables(positions, width) for rotary in rotaries]
    return all(
        torch.allclose(s * cos.float(), c * sin.float(), atol=0.02 if x.dtype != torch.float32 else 1e-4)
        for c, s in each
    )
