"""Replaces a model's linear layers by faster ones, and embeddings by bf16 ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specalign.kernels.linear import RowsLinear, together, uses_rows

_READ_PAST = ("dt_proj", "weights_proj")
"""Layers whose weight other modules read without calling them (Mamba; the indexers of DeepSeek and
GLM); it keeps its type."""


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
) -> int:
    """Replace every `nn.Linear` by `RowsLinear` where it is faster; returns how many. `round_to`:
    to bf16 or int8 (drafters only: p must not change)."""
    if not uses_rows(dtype, device):
        return 0
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                rounded = dtype if name in _READ_PAST else round_to
                setattr(parent, name, RowsLinear(child.weight, child.bias, rounded))
                count += 1
    if hasattr(module, "get_output_embeddings"):
        _narrow_embeddings(module)
    _settle(module)
    return count


@torch.no_grad()
def _narrow_embeddings(model: Any) -> None:
    """Embeddings in bf16 where all their numbers are, as one with the head if they are equal."""
    head = model.get_output_embeddings()
    if not isinstance(head, RowsLinear):
        return
    found: dict[nn.Module, nn.Module] = {}
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Embedding):
                if child not in found:
                    found[child] = _narrow(child, head) or child
                setattr(module, name, found[child])


def _narrow(old: Any, head: RowsLinear) -> RowsEmbedding | None:
    """An embedding in bf16; None where that changes its numbers, or it does more than scale."""
    if type(old) is not nn.Embedding and not hasattr(old, "embed_scale"):
        return None
    if old.weight.data_ptr() == head.weight.data_ptr():  # one that shares the head's memory
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
    for tied, place in zip(groups, together([tied[0] for tied in groups]), strict=True):
        place.copy_(tied[0])
        for parameter in tied:  # what held the numbers before is free then
            parameter.data = place
