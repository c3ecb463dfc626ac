"""Replaces a model's linear layers by faster ones, and embeddings by bf16 ones."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.kernels.linear import (
    PackedLinear,
    RowsConv1D,
    RowsLinear,
    fast_linear,
    is_conv1d,
    is_linear,
)
from specalign.kernels.pages import together


class RowsEmbedding(nn.Module):
    """An `nn.Embedding` kept in bf16 whose rows come out in fp32, times the `embed_scale` of one
    that has it (Gemma). `number` is empty: transformers takes a model's type from its first
    parameter, which is fp32 still."""

    embed_scale: Tensor

    def __init__(self, weight_VD: nn.Parameter, embed_scale: Tensor | float | None = None) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.empty(0, device=weight_VD.device), requires_grad=False)
        self.weight = weight_VD
        self.num_embeddings, self.embedding_dim = weight_VD.shape
        if embed_scale is not None:
            scale = torch.as_tensor(embed_scale, device=weight_VD.device)
            self.register_buffer("embed_scale", scale, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = F.embedding(tokens, self.weight).float()
        return rows if gives_rows(self) else rows * self.embed_scale.float()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}number"]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict({**state_dict, f"{prefix}number": self.number}, prefix, *rest)


def gives_rows(embedding: nn.Module) -> bool:
    """Whether it is an embedding that gives its weight's rows as they are."""
    kept = isinstance(embedding, RowsEmbedding) and "embed_scale" not in embedding._buffers
    return kept or type(embedding) is nn.Embedding


def speed_up_linears(
    module: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    round_to: torch.dtype | None = None,
    read_past: Collection[nn.Module] = (),
) -> int:
    """Replace every `nn.Linear` and `Conv1D` by the class that is fastest for few rows; returns how
    many. `round_to`: bf16 or int8 where that saves time (drafters only: p must not change).
    `read_past`: layers whose weights other modules read too; they keep their type."""
    kind = fast_linear(dtype, device)

    def replacement(layer: Any) -> nn.Module | None:
        if kind is PackedLinear:
            return None if is_conv1d(layer) else kind(layer.weight, layer.bias)
        made = RowsConv1D if is_conv1d(layer) else RowsLinear
        return made(layer.weight, layer.bias, dtype if layer in read_past else round_to)

    count = 0 if kind is None else _replace(module, replacement)
    if kind is not RowsLinear:
        return count
    if hasattr(module, "get_output_embeddings"):
        _narrow_embeddings(module, read_past)
    _settle(module)
    return count


@torch.no_grad()
def _narrow_embeddings(model: Any, read_past: Collection[nn.Module]) -> None:
    """Embeddings in bf16 where all their numbers are, as one with the head if they are equal."""
    head = model.get_output_embeddings()
    if not isinstance(head, RowsLinear):
        return
    found: dict[nn.Module, RowsEmbedding | None] = {}
    for old in (m for m in model.modules() if isinstance(m, nn.Embedding) and m not in read_past):
        if old.weight.data_ptr() != head.weight.data_ptr():  # else they stay as they are together
            found[old] = _narrow(old, head)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if (new := found.get(child)) is not None:
                setattr(module, name, new)


def _narrow(old: Any, head: RowsLinear) -> RowsEmbedding | None:
    """An embedding in bf16; None where that changes its numbers, or it does more than scale."""
    if type(old) is not nn.Embedding and not hasattr(old, "embed_scale"):
        return None
    kept = old.weight.to(torch.bfloat16)
    if old.weight.dtype != torch.float32 or not torch.equal(kept.float(), old.weight):
        return None
    same = head.weight.dtype == torch.bfloat16 and torch.equal(head.weight, kept)
    weight = head.weight if same else nn.Parameter(kept, requires_grad=False)
    new = RowsEmbedding(weight, getattr(old, "embed_scale", None))
    few = torch.arange(min(16, len(kept)), device=kept.device)
    return new if torch.equal(new(few), old(few)) else None


@torch.no_grad()
def _settle(module: nn.Module) -> None:
    """Move the parameters into one piece of memory, each from a line of the cache on, as those of
    mapped files seldom are: a third less time. Tied weights stay tied."""
    alike: dict[Any, list[nn.Parameter]] = {}
    for p in module.parameters():
        if p.device.type == "cpu":
            alike.setdefault((p.data_ptr(), p.dtype, p.shape, p.stride()), []).append(p)
    groups = list(alike.values())
    turned = [tied[0].dim() == 2 and not tied[0].is_contiguous() for tied in groups]  # RowsConv1D
    given = [tied[0].t() if t else tied[0] for tied, t in zip(groups, turned, strict=True)]
    for tied, place, own, t in zip(groups, together(given), given, turned, strict=True):
        place.copy_(own)
        for parameter in tied:  # what held the numbers before is free then
            parameter.data = place.t() if t else place


def _replace(module: nn.Module, made: Callable[[Any], nn.Module | None]) -> int:
    count = 0
    for name, child in list(module.named_children()):
        if is_linear(child):
            if (new := made(child)) is not None:
                setattr(module, name, new)
                count += 1
        else:
            count += _replace(child, made)
    return count
