"""A target layer's weights as a block drafter names them, found by what its modules compute.

One token runs through the model. A norm is the one before attention where its output is what the query projection reads. One
projection for queries, keys and values is taken apart as its output says: the keys and values in the cache lie in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from align.target.masks import Layout, laid

if TYPE_CHECKING:
    from align.target.model import Target

_NAMES = {
    "self_attn.q_proj": ("q_proj",),
    "self_attn.k_proj": ("k_proj",),
    "self_attn.v_proj": ("v_proj",),
    "self_attn.o_proj": ("o_proj", "out_proj", "dense", "attn.c_proj"),
    "mlp.gate_proj": ("gate_proj", "w1"),
    "mlp.up_proj": ("up_proj", "w3"),
    "mlp.down_proj": ("down_proj", "w2"),
}
"""A drafter's projections, and what they are called in layers."""


def embedding_scale(target: Target) -> float:
    """What the model multiplies embeddings by inside its embedding module (Gemma)."""
    scale = getattr(target.model.get_input_embeddings(), "embed_scale", None)
    return 1.0 if scale is None else float(scale)


@torch.no_grad()
def embeds_rows(target: Target) -> bool:
    """Whether a token's embedding is its row times that scale, and nothing else is done to it (Muse Glimmer norms it)."""
    rows = target.embedding_VD[:16]
    read = target.embed(torch.arange(len(rows), device=rows.device))
    return torch.allclose(read.float(), rows.float() * embedding_scale(target), rtol=2e-2, atol=1e-6)


@dataclass
class Seen:
    """A module at work: its name in its layer, what it read and what it wrote, flat, for one token."""

    name: str
    module: Any
    read: Tensor
    wrote: Tensor


@torch.no_grad()
def last_norm(target: Target) -> Tensor | None:
    """The weight of the norm that writes the last hidden state; None where there is none."""
    children = [child for child in target.body.children() if child is not target.layers]
    seen, hidden = _traced(target, {str(i): child for i, child in enumerate(children)})[:2]
    found = [s for s in seen if s.wrote.shape == hidden.shape and torch.equal(s.wrote, hidden)]
    return norm_weight(found[-1].module, hidden.shape[-1]) if found else None


@torch.no_grad()
def layer_parts(target: Target, index: int) -> dict[str, Tensor]:
    """A layer's weights, fp32, by a drafter's parameter names; what can't be told apart is left out."""
    layer: Any = target.layers[index]
    leaves = {name: m for name, m in layer.named_modules() if name and not list(m.children())}
    seen, _, cache = _traced(target, leaves)
    found = {
        name: p.detach().float()
        for name, p in layer.named_parameters()
        if "norm" not in name and p.dim() < 3 and p.dtype.itemsize > 1  # of one byte are quantised ones
    }
    at: dict[str, Seen] = {}
    for mine, names in _NAMES.items():
        those = [s for s in seen if _ends(s.name, names) and _matrix(s) is not None]
        if len(those) == 1:
            at[mine] = those[0]
            found |= _named(mine, *_linear(those[0]))
    attends = not target.anatomy.repeats and target.anatomy.shapes[index] is not None
    kept: Any = cache.layers[index] if attends else None
    if "self_attn.q_proj" not in at and kept is not None:
        for s in seen:
            if (parts := _apart(s, kept.keys[0, :, -1], kept.values[0, :, -1], target.num_heads)) is not None:
                at["self_attn.q_proj"] = s
                found |= parts
    if "mlp.gate_proj" not in at and (down := at.get("mlp.down_proj")) is not None:
        for s in seen:
            if (halves := _gated(s, down, layer)) is not None:
                at["mlp.gate_proj"] = s
                found |= halves
    for mine, reader in (
        ("input_layernorm", "self_attn.q_proj"),
        ("post_attention_layernorm", "mlp.gate_proj"),
    ):
        if reader in at and (weight := _feeding(at[reader], seen)) is not None:
            found[f"{mine}.weight"] = weight
    if "mlp.gate_proj.weight" not in found:  # another kind of feed-forward
        found = {name: tensor for name, tensor in found.items() if not name.startswith("mlp.")}
    for norm in ("q_norm", "k_norm"):
        module = getattr(getattr(layer, "self_attn", None), norm, None)
        if module is not None and (weight := getattr(module, "weight", None)) is not None:
            found[f"self_attn.{norm}.weight"] = norm_weight(module, len(weight))
    return found


def norm_weight(module: Any, width: int) -> Tensor:
    """By what a norm multiplies, (width,) fp32: its weight, or one more; ones where it has none. A bias is left out."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.shape != (width,):
        return torch.ones(width)
    weight, bias = weight.detach().float().cpu(), getattr(module, "bias", None)
    probe = torch.randn(1, 3, width, generator=torch.Generator().manual_seed(0))
    scaled = probe / probe.pow(2).mean(-1, keepdim=True).sqrt()
    centred = F.layer_norm(probe, (width,))
    shift = 0 if bias is None else bias.detach().float().cpu()
    try:
        wrote = module(probe.to(module.weight.device, module.weight.dtype)).float().cpu()
    except Exception:  # one that is called in another way
        return weight
    forms = [(weight, scaled), (weight, centred), (weight + 1, scaled), (weight + 1, centred)]
    return min(forms, key=lambda form: float((form[0] * form[1] + shift - wrote).abs().max()))[0]


def through_own_cache(target: Target, tokens: Tensor, positions: Tensor, past: int, cache: Any) -> Tensor:
    """The model's last hidden states of tokens at these positions, (1, L) each, with its own kind of cache, which holds `past`."""
    with laid(Layout(positions, past, target.groups, target.dtype)):
        hidden: Tensor = target.body(**target.anatomy.arguments(tokens, positions, cache)).last_hidden_state
    return hidden


def _traced(target: Target, modules: dict[str, Any]) -> tuple[list[Seen], Tensor, Any]:
    """One token through the model: what these modules did, its last hidden state (D,), and its cache."""
    seen: list[Seen] = []

    def hook(name: str) -> Any:
        def keep(module: Any, given: tuple[Any, ...], wrote: Any) -> None:
            if given and all(isinstance(t, Tensor) and t.is_floating_point() for t in (given[0], wrote)):
                seen.append(Seen(name, module, given[0].flatten().clone(), wrote.flatten().clone()))

        return keep

    token = torch.tensor([[target.vocab_size // 2]], device=target.device)
    place, cache = torch.zeros_like(token), target.anatomy.empty_cache()
    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        hidden = through_own_cache(target, token, place, 0, cache)
    finally:
        for handle in handles:
            handle.remove()
    return seen, hidden.flatten(), cache


def _ends(name: str, names: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in names)


def _matrix(s: Seen) -> Tensor | None:
    """The weight of a linear layer as (out, in), whichever way it keeps it; None where it is of another kind."""
    weight = getattr(s.module, "weight", None)
    if weight is None or weight.dim() != 2:
        return None
    weight, bias = weight.detach().float(), getattr(s.module, "bias", None)
    for w in (weight, weight.T):
        if w.shape == (len(s.wrote), len(s.read)):
            product = F.linear(s.read.float(), w, None if bias is None else bias.detach().float())
            if _close(product, s.wrote):
                return w
    return None


def _linear(s: Seen) -> tuple[Tensor, Tensor | None]:
    weight, bias = _matrix(s), getattr(s.module, "bias", None)
    assert weight is not None
    return weight, None if bias is None else bias.detach().float()


def _named(name: str, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
    return {f"{name}.weight": weight, **({} if bias is None else {f"{name}.bias": bias})}


def _close(one: Tensor, other: Tensor) -> bool:
    size = float(other.float().pow(2).mean().sqrt()) + 1e-12
    coarse = other.dtype != torch.float32
    return float((one.float() - other.float()).abs().max()) < (0.1 if coarse else 1e-3) * size


def _apart(s: Seen, keys: Tensor, values: Tensor, heads: int) -> dict[str, Tensor] | None:
    """Queries, keys and values out of one projection whose output holds these (Hkv, width), at position 0; None where it does
    not."""
    (kv_heads, width), wide = keys.shape, values.shape[1]
    if len(s.wrote) != heads * width + kv_heads * (width + wide) or _matrix(s) is None:
        return None
    rows = torch.arange(len(s.wrote))
    parts = [rows.split([heads * width, kv_heads * width, kv_heads * wide])]
    if heads % kv_heads == 0:  # each key head behind its queries
        groups = rows.view(kv_heads, -1).split([heads // kv_heads * width, width, wide], dim=1)
        parts.append(tuple(part.flatten() for part in groups))
    weight, bias = _linear(s)
    for q, k, v in parts:
        if _close(s.wrote[v], values.flatten()):
            found: dict[str, Tensor] = {}
            for name, its in (("q", q), ("k", k), ("v", v)):
                found |= _named(f"self_attn.{name}_proj", weight[its], None if bias is None else bias[its])
            return found
    return None


def _gated(s: Seen, down: Seen, layer: Any) -> dict[str, Tensor] | None:
    """Gate and value out of one projection, where act(gate)·value is what `down` reads; None where it is not."""
    inner = len(down.read)
    if len(s.wrote) != 2 * inner or _matrix(s) is None:
        return None
    acts: Sequence[Any] = [m for m in layer.modules() if not list(m.children()) and not list(m.parameters())]
    weight, bias = _linear(s)
    for gate, up in ((slice(inner), slice(inner, None)), (slice(inner, None), slice(inner))):
        for act in [nn.SiLU(), *acts]:
            try:
                product = act(s.wrote[gate]) * s.wrote[up]
            except Exception:  # no function of one tensor
                continue
            if product.shape == down.read.shape and _close(product, down.read):
                found = _named("mlp.gate_proj", weight[gate], None if bias is None else bias[gate])
                return found | _named("mlp.up_proj", weight[up], None if bias is None else bias[up])
    return None


def _feeding(reader: Seen, seen: Sequence[Seen]) -> Tensor | None:
    """The weight of the norm that wrote what `reader` read."""
    for s in seen:
        weight = getattr(s.module, "weight", None)
        norm = weight is None or weight.dim() == 1
        if norm and s.wrote.shape == reader.read.shape == s.read.shape and torch.equal(s.wrote, reader.read):
            return norm_weight(s.module, len(s.read))
    return None
