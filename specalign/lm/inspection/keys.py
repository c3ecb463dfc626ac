"""How a target's layers write positions into their keys, measured on the same input at several
positions.

Rotary keys at position p are the keys at 0, rotated: k(p) = R(p)·k(0). Keys that stay the same have
no position but that of the input (learned positions, ALiBi). Values stay the same; otherwise they
are none (compressed caches keep a key's rotary part there).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specalign.common.schema import JsonObject
from specalign.lm.masks import Layout, use_layout

if TYPE_CHECKING:
    from specalign.lm.model import Target

KeyValue = tuple[Tensor, Tensor]
"""A layer's keys and values of one token, (1, Hkv, 1, width), fp32."""
LAYOUTS = ("half", "pairs")
_POSITIONS = (1, 7, 90)
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.03, torch.bfloat16: 0.1}
"""The largest difference that is rounding, in root mean squares of the keys."""


@dataclass(frozen=True)
class RotaryTable:
    """Pairs of a head's numbers rotated by position · inv_freq; the others stay. Without
    frequencies: no position.

    layout: the pairs are two halves (half) or neighbours (pairs). start: the first rotated number.
    scale: a factor of rotated keys (YaRN's attention factor, arXiv 2309.00071, section 3.4).
    """

    layout: str = "half"
    start: int = 0
    inv_freq: tuple[float, ...] = ()
    scale: float = 1.0

    def entry(self) -> dict[str, object]:
        """As a drafter's config.json holds it."""
        scale = {} if self.scale == 1 else {"scale": self.scale}
        frequencies = list(self.inv_freq)
        return {"layout": self.layout, "start": self.start, "inv_freq": frequencies, **scale}

    def full(self, width: int) -> bool:
        """Whether it is what `attention.rotate` computes: over all numbers of a head, or none."""
        return not self.inv_freq or (
            self.layout == "half" and self.start == 0 and 2 * len(self.inv_freq) == width
        )

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The places of each pair's two numbers."""
        steps = torch.arange(len(self.inv_freq))
        if self.layout == "half":
            return self.start + steps, self.start + len(steps) + steps
        return self.start + 2 * steps, self.start + 2 * steps + 1

    def partner(self, width: int) -> Tensor:
        """With which number of a head each one is turned, (width,)."""
        first, second = self.pairs()
        found = torch.arange(width)
        found[first], found[second] = second, first
        return found

    def tables(self, positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """cos and sin for positions (…) → (…, width), fp32; sin is signed unless `full`."""
        first, second = (t.to(positions.device) for t in self.pairs())
        angles = positions[..., None].float() * torch.tensor(
            self.inv_freq, dtype=torch.float32, device=positions.device
        )
        cos = torch.ones(*positions.shape, width, dtype=torch.float32, device=positions.device)
        sin = torch.zeros_like(cos)
        cos[..., first] = cos[..., second] = angles.cos() * self.scale
        sin[..., second] = angles.sin() * self.scale
        sin[..., first] = sin[..., second] if self.full(width) else -sin[..., second]
        return cos, sin

    def rotate_at(self, x: Tensor, position: int) -> Tensor:
        """(…, width) as it is at a position."""
        width = x.shape[-1]
        cos, sin = self.tables(torch.tensor(position, device=x.device), width)
        if self.full(width):
            sin = torch.cat((-sin[: width // 2], sin[width // 2 :]))
        return x * cos + x[..., self.partner(width).to(x.device)] * sin


def plain_rotary(width: int, base: float) -> RotaryTable:
    """Over all numbers of a head, with the usual frequencies."""
    return RotaryTable("half", 0, frequencies(width, base))


def frequencies(width: int, base: float) -> tuple[float, ...]:
    steps = torch.arange(0, width, 2, dtype=torch.float32) / width
    return tuple((1.0 / base**steps).tolist())


_FOUND: WeakKeyDictionary[Target, list[RotaryTable | str]] = WeakKeyDictionary()


def key_rotaries(target: Target) -> list[RotaryTable | str]:
    """How each layer writes positions into its keys, or why that is unknown. Computed once."""
    if target not in _FOUND:
        _FOUND[target] = _find_rotaries(target)
    return list(_FOUND[target])


@torch.no_grad()
def _find_rotaries(target: Target) -> list[RotaryTable | str]:
    inputs: dict[nn.Module, Tensor] = {}
    try:
        if target.anatomy.repeats:
            raise NotImplementedError
        at_start = _run_layers(target, 0, inputs)
        moved = {p: _run_layers(target, p, inputs) for p in _POSITIONS if p < target.context_limit}
    except Exception:  # layers that are called in another way fail in many ways
        return ["its layers have a non-standard call signature"] * target.num_layers
    found: list[RotaryTable | str] = []
    for i, pair in enumerate(at_start):
        others = {p: pairs[i] for p, pairs in moved.items()}
        found.append("it does not cache keys" if pair is None else _match(target, pair, others))
    return found


def _match(
    target: Target, at_start: KeyValue, moved: dict[int, KeyValue | None]
) -> RotaryTable | str:
    """The rotation that turns the keys at position 0 into those at the others."""
    keys, values = at_start
    others = {position: pair for position, pair in moved.items() if pair is not None}
    tolerance = _TOLERANCE[target.dtype]
    if max(_distance(values, pair[1]) for pair in others.values()) > tolerance:
        return "its cached values depend on the position, as compressed ones do"

    def error(rotary: RotaryTable) -> float:
        return max(_distance(rotary.rotate_at(keys, p), pair[0]) for p, pair in others.items())

    best = min(_candidates(target, keys.shape[-1]), key=error)
    if error(best) < tolerance:
        return best
    return "its keys at two positions do not differ by a known rotation"


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, in root mean squares."""
    return float((one - other).abs().max() / (one.pow(2).mean().sqrt() + 1e-12))


def _run_layers(
    target: Target, position: int, inputs: dict[nn.Module, Tensor]
) -> list[KeyValue | None]:
    """Each layer's keys and values of one token at a position. The first run, with empty `inputs`,
    notes the layers' inputs there; later runs give each layer these."""
    token = torch.tensor([[target.vocab_size // 2]], device=target.device)
    is_first = not inputs
    cache = target.anatomy.empty_cache()

    def run(tokens: Tensor, positions: Tensor, past: int) -> None:
        with use_layout(Layout(positions, past, target.groups, target.dtype)):
            target.body(**target.anatomy.arguments(tokens, positions, cache))

    past = position if target.anatomy.by_place else 0
    if past:  # the cache entry is the position there
        run(token.expand(1, past), torch.arange(past, device=target.device)[None], 0)

    def replace_input(module: nn.Module, args: tuple[Any, ...], kwargs: JsonObject) -> Any:
        named = "hidden_states" in kwargs
        if is_first:
            inputs[module] = kwargs["hidden_states"] if named else args[0]
            return None
        if named:
            return args, {**kwargs, "hidden_states": inputs[module]}
        return (inputs[module], *args[1:]), kwargs

    hooks = [m.register_forward_pre_hook(replace_input, with_kwargs=True) for m in target.layers]
    try:
        run(token, torch.full_like(token, position), past)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[KeyValue | None] = []
    for layer, shape in zip(cache.layers, target.anatomy.shapes, strict=True):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if shape is None or keys is None or values is None or not values.numel():
            found.append(None)
        else:
            found.append((keys[:, :, -1:].float(), values[:, :, -1:].float()))
    return found


def _candidates(target: Target, width: int) -> Iterator[RotaryTable]:
    """Rotations of keys of a width by the frequencies in the model's buffers."""
    yield RotaryTable()
    buffers = [buffer for name, buffer in target.body.named_buffers() if "inv_freq" in name]
    tables = {tuple(buffer.float().flatten().tolist()) for buffer in buffers}
    tables |= {tuple(-f for f in table) for table in tables}  # NanoChat turns the other way
    for table in sorted(tables):
        if 0 < 2 * len(table) <= width and all(math.isfinite(f) for f in table):
            for start in sorted({0, width - 2 * len(table)}):
                for layout in LAYOUTS:
                    yield RotaryTable(layout, start, table)
