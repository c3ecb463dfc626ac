"""Our attention as transformers' models call it, and masks by position (causal, sliding, chunked),
over a cache that keeps everything.

A model asks for a mask for each kind of layer, by a rule of positions
(`transformers.masking_utils`). The rule is evaluated at our tokens' positions, wherever they lie in
the cache: a node of a tree has its depth, so a sliding window is exact in every branch, after every
rollback and for every request of a batch.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from specalign.common.schema import JsonObject
from specalign.lm.attention import (
    biased_attention,
    expand_mask,
    grouped_attention,
    sparse_attention,
    sparse_mask,
    visible_mask,
)
from specalign.lm.cache import Parts, Slots

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Whether a query sees a key: (row, head, query's position, key's position) → bool."""

NAME = "grouped_attention"
OWN = "eager"
"""A model's own attention, which every architecture has."""
_HARMLESS = {
    "position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


@dataclass
class Layout:
    """Positions of the new tokens of one request, or of rows of one length.

    Args:
        positions_BL: of the new tokens, (B or 1, L).
        past: cache entries before them; an entry's index is its position.
        groups: query heads per key head, 1 where layers differ.
        see_LL: bool, which of the new tokens each one sees; None = those up to itself.
        mask: bool (B or 1, 1, L, S), instead of `see_LL`: over all S entries.
        slots: of rows of different lengths; the new tokens lie among the S entries.
        groups_seen: query heads per key head of the layers that called our attention function.
    """

    positions_BL: Tensor
    past: int
    groups: int
    dtype: torch.dtype
    see_LL: Tensor | None = None
    mask: Tensor | None = None
    slots: Slots | None = None
    groups_seen: set[int] = field(default_factory=set)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The first and the last position of the new tokens."""
        positions = self.positions_BL.flatten().tolist()
        return min(positions), max(positions)

    def visible(self, rule: Rule | None) -> Tensor:
        """The mask, bool (B or 1, 1, L, S); `rule`: None = the order of the tokens alone."""
        rows, length = self.positions_BL.shape
        device = self.positions_BL.device
        see = self.mask
        if see is None:
            see = visible_mask(self.see_LL, length, self.past, device)[None, None]
        if rule is None:
            return see
        size = see.shape[-1]
        if self.slots is not None and self.slots.positions_BS is not None:
            keys_BS = self.slots.positions_BS
        elif self.slots is not None:
            keys_BS = torch.arange(size, device=device).expand(rows, -1)
        else:
            old_BS = torch.arange(size - length, device=device).expand(rows, -1)
            keys_BS = torch.cat((old_BS, self.positions_BL), dim=1)
        row = torch.arange(rows, device=device)[:, None, None, None]
        queries_B1L1, keys_B11S = self.positions_BL[:, None, :, None], keys_BS[:, None, None]
        return see & rule(row, row.new_zeros(1), queries_B1L1, keys_B11S)

    def for_grouped(self, rule: Rule | None) -> Tensor | BlockMask | None:
        """The mask as `attention.grouped_attention` takes it, or `sparse_attention`."""
        if self.mask is not None and _SPARSE.get():
            return sparse_mask(self.visible(rule))
        is_single = self.mask is None and self.positions_BL.shape[1] == 1
        if is_single and rule is None:
            return None
        see = self.visible(rule)
        if is_single:
            return None if bool(see.all()) else see
        return see if self.mask is not None else expand_mask(see[0, 0], self.groups, self.dtype)

    def for_eager(self, rule: Rule | None) -> Tensor:
        """An additive mask, (B or 1, 1, L, S), for a model's own attention."""
        see = self.visible(rule)
        lowest = torch.finfo(self.dtype).min
        return torch.zeros_like(see, dtype=self.dtype).masked_fill_(~see, lowest)


@dataclass
class BatchLayout:
    """Several requests side by side in one row, each with its own layout."""

    parts: Sequence[Layout]
    groups_seen: set[int] = field(default_factory=set)

    def for_grouped(self, rule: Rule | None) -> Tensor:
        """A stand-in that carries each request's mask, as `.parts`."""
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=self.parts[0].positions_BL.device)
        mask.parts = [part.for_grouped(rule) for part in self.parts]  # type: ignore[attr-defined]
        return mask

    def for_eager(self, rule: Rule | None) -> Tensor:
        raise NotImplementedError("a model's own attention takes one request at a time")


_CURRENT: ContextVar[Layout | BatchLayout | None] = ContextVar("layout", default=None)


_SPARSE: ContextVar[bool] = ContextVar("sparse", default=False)


@contextmanager
def sparse_masks() -> Iterator[None]:
    """Context manager in which given masks go to flex_attention."""
    token = _SPARSE.set(True)
    try:
        yield
    finally:
        _SPARSE.reset(token)


@contextmanager
def use_layout(layout: Layout | BatchLayout) -> Iterator[None]:
    """Context manager in which models with the attention of `specalign.lm.masks` use this
    layout."""
    token = _CURRENT.set(layout)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _grouped_mask(**call: Any) -> Tensor | BlockMask | None:
    """The mask of our attention; without a layout transformers' own."""
    layout = _CURRENT.get()
    return sdpa_mask(**call) if layout is None else layout.for_grouped(_rule(call))


def _own_mask(**call: Any) -> Tensor | None:
    """The same for a model's own eager attention."""
    layout = _CURRENT.get()
    return eager_mask(**call) if layout is None else layout.for_eager(_rule(call))


def _rule(call: JsonObject) -> Rule | None:
    rule = call.get("mask_function", causal_mask_function)
    return None if rule is causal_mask_function else rule


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Parts,
    value: Tensor | Parts,
    attention_mask: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    for name, given in kwargs.items():
        if isinstance(given, Tensor) and name not in _HARMLESS:
            raise NotImplementedError(f"its attention takes {name!r}")  # which is ignored here
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, causal: bool) -> Tensor:
        if isinstance(mask, BlockMask):
            return sparse_attention(q, k, v, mask, scale, softcap, s_aux)
        if softcap is None and s_aux is None:
            return grouped_attention(q, k, v, mask, scale, causal)
        return biased_attention(q, k, v, mask, scale, softcap, s_aux)

    if isinstance(key, Parts):  # several requests in one forward pass, each with its own past
        assert isinstance(value, Parts) and attention_mask is not None
        masks = attention_mask.parts
        queries = query.split(key.widths, dim=2)
        requests = zip(queries, key.tensors, value.tensors, masks, strict=True)
        out = torch.cat([attend(q, k, v, mask, False) for q, k, v, mask in requests], dim=2)
    else:
        assert isinstance(value, Tensor)
        # compiled code can't read it; it is noted once, when the target is proved
        layout = None if torch.compiler.is_compiling() else _CURRENT.get()
        if layout is not None:
            layout.groups_seen.add(query.shape[1] // key.shape[1])
        causal = bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
        out = attend(query, key, value, attention_mask, causal)
    return out.transpose(1, 2).contiguous(), None


def register() -> str:
    """Register the function with transformers and return its name."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, _grouped_mask)
    AttentionMaskInterface.register(OWN, _own_mask)
    return NAME


def install(model: PreTrainedModel, own: bool = False) -> None:
    """Make a model attend through this file; `own`: through its own eager attention, with our
    masks. A model that takes no other attention silently keeps its own."""
    register()
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        model.set_attn_implementation(OWN if own else NAME)
    finally:
        logger.setLevel(level)
