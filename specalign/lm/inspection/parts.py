"""A target layer's weights by a block drafter's names, found by what its modules compute.

One token runs through the model. The norm whose output the query projection reads is the one before
attention. A fused projection of queries, keys and values is split where its output holds the values
in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specalign.lm.masks import Layout, laid

if TYPE_CHECKING:
    from specalign.lm.model import Target

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
    """Whether a token's embedding is its row times that scale, and nothing else is done to it (Muse
    Glimmer norms it)."""
    rows = target.embedding_VD[:16]
    read = target.embed(torch.arange(len(rows), device=rows.device))
    return torch.allclose(
        read.float(), rows.float() * embedding_scale(target), rtol=2e-2, atol=1e-6
    )


@dataclass
class Call:
    """One forward pass of a module: its name in its layer, what it read and what it wrote, flat,
    for one token."""

    name: str
    module: Any
    read: Tensor
    wrote: Tensor

    def matrix(self) -> Tensor | None:
        """The weight of a linear layer as (out, in), stored either way; None of another kind."""
        weight = getattr(self.module, "weight", None)
        if weight is None or weight.dim() != 2:
            return None
        bias = getattr(self.module, "bias", None)
        bias = None if bias is None else bias.detach().float()
        for w in (weight.detach().float(), weight.detach().float().T):
            fits = w.shape == (len(self.wrote), len(self.read))
            if fits and _close(F.linear(self.read.float(), w, bias), self.wrote):
                return w
        return None

    def rows(self, name: str, rows: slice) -> dict[str, Tensor]:
        """These outputs of a linear layer, as the parameters of one of this name."""
        weight, bias = self.matrix(), getattr(self.module, "bias", None)
        assert weight is not None
        found = {f"{name}.weight": weight[rows]}
        return found if bias is None else {**found, f"{name}.bias": bias.detach().float()[rows]}


@torch.no_grad()
def last_norm(target: Target) -> Tensor | None:
    """The weight of the norm that writes the last hidden state; None where there is none."""
    children = [child for child in target.body.children() if child is not target.layers]
    calls, hidden, _ = _trace(target, {str(i): child for i, child in enumerate(children)})
    found = [c for c in calls if torch.equal(c.wrote, hidden)]
    return norm_weight(found[-1].module, hidden.shape[-1]) if found else None


@torch.no_grad()
def layer_parts(target: Target, index: int) -> dict[str, Tensor]:
    """A layer's weights, fp32, by a drafter's parameter names; those that cannot be identified are
    left out."""
    layer: Any = target.layers[index]
    leaves = {name: m for name, m in layer.named_modules() if name and not list(m.children())}
    calls, _, cache = _trace(target, leaves)
    found = {
        name: p.detach().float()
        for name, p in layer.named_parameters()
        # those of one byte are quantised
        if "norm" not in name and p.dim() < 3 and p.dtype.itemsize > 1
    }
    at: dict[str, Call] = {}
    for mine, names in _NAMES.items():
        endings = tuple(f".{name}" for name in names)
        those = [c for c in calls if f".{c.name}".endswith(endings) and c.matrix() is not None]
        if len(those) == 1:
            at[mine] = those[0]
            found |= those[0].rows(mine, slice(None))
    attends = not target.anatomy.repeats and target.anatomy.shapes[index] is not None
    if "self_attn.q_proj" not in at and attends:
        slab: Any = cache.layers[index]
        keys, values = slab.keys[0, :, -1].flatten(), slab.values[0, :, -1].flatten()
        start = target.num_heads * slab.keys.shape[-1]
        for c in calls:  # one projection of queries, keys and values in this order
            edges = (start, start + len(keys), start + len(keys) + len(values))
            if (
                len(c.wrote) == edges[2]
                and _close(c.wrote[edges[1] :], values)
                and c.matrix() is not None
            ):
                at["self_attn.q_proj"] = c
                found |= c.rows("self_attn.q_proj", slice(edges[0]))
                found |= c.rows("self_attn.k_proj", slice(edges[0], edges[1]))
                found |= c.rows("self_attn.v_proj", slice(edges[1], None))
    if "mlp.gate_proj" not in at and "mlp.down_proj" in at:
        inner = len(at["mlp.down_proj"].read)
        for c in calls:  # one projection of gate and value in this order
            if (
                c.name.endswith("gate_up_proj")
                and len(c.wrote) == 2 * inner
                and c.matrix() is not None
            ):
                at["mlp.gate_proj"] = c
                found |= c.rows("mlp.gate_proj", slice(inner))
                found |= c.rows("mlp.up_proj", slice(inner, None))
    for norm, reader in (("input", "self_attn.q_proj"), ("post_attention", "mlp.gate_proj")):
        weight = _norm_before(at[reader], calls) if reader in at else None
        if weight is not None:
            found[f"{norm}_layernorm.weight"] = weight
    if "mlp.gate_proj.weight" not in found:  # another kind of feed-forward
        found = {name: tensor for name, tensor in found.items() if not name.startswith("mlp.")}
    for norm in ("q_norm", "k_norm"):
        module = getattr(getattr(layer, "self_attn", None), norm, None)
        weight = getattr(module, "weight", None)
        if weight is not None:
            found[f"self_attn.{norm}.weight"] = norm_weight(module, len(weight))
    return found


def norm_weight(module: Any, width: int) -> Tensor:
    """A norm's factor, (width,) fp32: its weight, or one more; ones where it has none. A bias is
    left out."""
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


def through_own_cache(
    target: Target, tokens: Tensor, positions: Tensor, past: int, cache: Any
) -> Tensor:
    """The model's last hidden states of tokens at these positions, (1, L) each, with its own kind
    of cache, which holds `past`."""
    with laid(Layout(positions, past, target.groups, target.dtype)):
        hidden: Tensor = target.body(
            **target.anatomy.arguments(tokens, positions, cache)
        ).last_hidden_state
    return hidden


def _trace(target: Target, modules: dict[str, Any]) -> tuple[list[Call], Tensor, Any]:
    """One token through the model: these modules' calls, its last hidden state (D,), and its
    cache."""
    calls: list[Call] = []

    def hook(name: str) -> Any:
        def keep(module: Any, args: tuple[Any, ...], wrote: Any) -> None:
            if args and all(
                isinstance(t, Tensor) and t.is_floating_point() for t in (args[0], wrote)
            ):
                calls.append(Call(name, module, args[0].flatten().clone(), wrote.flatten().clone()))

        return keep

    token = torch.tensor([[target.vocab_size // 2]], device=target.device)
    cache = target.anatomy.empty_cache()
    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        hidden = through_own_cache(target, token, torch.zeros_like(token), 0, cache)
    finally:
        for handle in handles:
            handle.remove()
    return calls, hidden.flatten(), cache


def _close(one: Tensor, other: Tensor) -> bool:
    size = float(other.float().pow(2).mean().sqrt()) + 1e-12
    coarse = other.dtype != torch.float32
    return float((one.float() - other.float()).abs().max()) < (0.1 if coarse else 1e-3) * size


def _norm_before(reader: Call, calls: Sequence[Call]) -> Tensor | None:
    """The weight of the norm that wrote what `reader` read."""
    for call in calls:
        weight = getattr(call.module, "weight", None)
        is_norm = (weight is None or weight.dim() == 1) and call.read.shape == reader.read.shape
        if is_norm and torch.equal(call.wrote, reader.read):
            return norm_weight(call.module, len(call.read))
    return None
