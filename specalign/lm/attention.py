"""Attention of target and drafter: grouped queries without repeating keys, through SDPA. Targets
call it through `specalign.lm.masks`; `attend` is for our own networks.

transformers repeats K and V for every query head as soon as a mask is given (9 heads read 3 times
the memory on SmolLM2). Here the query heads of a group become extra query rows of their shared key
head instead.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from specalign.common.errors import UserError, nearest

BACKENDS = ("sdpa", "flash_attn")
BLOCK = 128  # cache entries that flex_attention reads or skips together
WIDE = 64  # with more rows, repeating the keys is cheap next to the product


def visible_mask(see_LL: Tensor | None, length: int, past: int, device: torch.device) -> Tensor:
    """The attention mask of `length` tokens, bool (L, past + L): the past, and each other by
    `see_LL` (None = causal)."""
    see_LS = torch.ones(length, past + length, dtype=torch.bool, device=device)
    if see_LL is None:
        return see_LS.tril_(past)
    see_LS[:, past:] = see_LL
    return see_LS


def expand_mask(see_LS: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask, bool (L, S), in the form that is fastest for `grouped_attention`: for few tokens
    additive, by its query rows, (1, 1, groups·L, S); else boolean, (1, 1, L, S)."""
    if groups == 1 or len(see_LS) > WIDE:
        return see_LS[None, None]
    added = torch.zeros_like(see_LS, dtype=dtype).masked_fill_(~see_LS, -torch.inf)
    return added.repeat(groups, 1)[None, None]


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Attention of (B, H, L, d) queries over (B, Hkv, S, d) keys and values, H a multiple of Hkv →
    (B, H, L, d). `mask`: bool (B or 1, 1, L, S), or of `expand_mask`; None = everything, or causal
    if `causal`."""
    batch, heads, length, width = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    if causal and mask is None and length > 1:
        mask = visible_mask(None, length, size - length, query.device)[None, None]
    if groups == 1 or length > WIDE:
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    rows = query.reshape(batch, kv_heads, groups * length, width)
    if mask is not None and length > 1 and mask.shape[-2] == length:
        mask = mask.expand(-1, -1, length, -1).repeat(1, 1, groups, 1)
    out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, length, value.shape[-1])


def biased_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`grouped_attention` with capped scores, cap·tanh(s/cap), and with a sink: a logit per head
    that takes a share of the softmax and has no value. Softmax in fp32."""
    batch, heads, length, width = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    rows = query.reshape(batch, kv_heads, groups * length, width)
    scores = (rows @ key.transpose(-1, -2) * scale).view(batch, kv_heads, groups, length, size)
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask[:, :, None], torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask.view(1, 1, groups, length, size)
    scores = scores.float()
    if sinks_H is not None:
        sink = sinks_H.float().view(1, kv_heads, groups, 1, 1).expand(batch, -1, -1, length, 1)
        scores = torch.cat((scores, sink), dim=-1)
    weights = scores.softmax(-1)[..., :size].to(value.dtype)
    out = weights.view(batch, kv_heads, groups * length, size) @ value
    return out.reshape(batch, heads, length, value.shape[-1])


def sparse_mask(see_B1LS: Tensor) -> BlockMask:
    """A mask for `sparse_attention`: blocks of the cache that no token sees are not read."""
    size = see_B1LS.shape[-1]
    padded = F.pad(see_B1LS, (0, -size % BLOCK))
    used_B11N = padded.unflatten(-1, (-1, BLOCK)).any(-1).any(2, keepdim=True).int()
    order_B11N = used_B11N.sort(dim=-1, descending=True, stable=True).indices.int()
    blocks = -(-see_B1LS.shape[2] // BLOCK)  # of queries

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return see_B1LS[row % len(see_B1LS), 0, query, key]

    return BlockMask.from_kv_blocks(
        used_B11N.sum(-1).int().repeat(1, 1, blocks),
        order_B11N.repeat(1, 1, blocks, 1),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(see_B1LS.shape[2], size),
    )


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    scale: float,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`grouped_attention` or `biased_attention` through flex_attention, which on a GPU splits the
    keys among its processors; compiled, if the caller is."""

    def cap_score(score: Tensor, *_: Tensor) -> Tensor:
        return score if cap is None else cap * torch.tanh(score / cap)

    grouped = query.shape[1] != key.shape[1]
    inputs = (query, key, value, cap_score, mask, scale, grouped)
    if sinks_H is None:
        return flex_attention(*inputs)
    out, aux = flex_attention(*inputs, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    return out * torch.sigmoid(aux.lse - sinks_H[:, None])[..., None].to(out.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split, of (…, d) with tables that broadcast."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, backend: str = "sdpa"
) -> Tensor:
    """softmax(q·kᵀ/√d)·v, shapes and `mask` as in `grouped_attention`; None = everything. Raises
    UserError if flash_attn can't run here or would compute something else."""
    if backend == "sdpa":
        return grouped_attention(query, key, value, mask, query.shape[-1] ** -0.5)
    if backend not in BACKENDS:
        raise UserError(f"attention backend {backend!r} is unknown{nearest(backend, BACKENDS)}")
    starts = None if mask is None else segment_starts(mask)
    if reason := _flash_refusal(query, starts is None and mask is not None):
        raise UserError(f"attention backend 'flash_attn' {reason}; use 'sdpa'")
    import flash_attn  # an optional dependency

    inputs = [t.transpose(1, 2) for t in (query, key, value)]
    if starts is None:
        return flash_attn.flash_attn_func(*inputs).transpose(1, 2)
    rows, longest = len(query), int(starts.diff().max())
    flat = (t.expand(rows, -1, -1, -1).flatten(0, 1) for t in inputs)
    out: Tensor = flash_attn.flash_attn_varlen_func(*flat, starts, starts, longest, longest)
    return out.unflatten(0, (rows, query.shape[2])).transpose(1, 2)


def segment_starts(mask: Tensor) -> Tensor | None:
    """The starts of the segments (packed documents) of a block-diagonal mask, bool (B, 1, L, L):
    int32, cumulative over the concatenated rows, including the end. None = another kind of mask."""
    if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, mask.shape[3]):
        return None
    see_BLL = mask[:, 0]
    first_BL = torch.ones_like(see_BLL[:, 0])
    first_BL[:, 1:] = ~see_BLL.diagonal(1, 1, 2)
    segment_BL = first_BL.long().cumsum(1)
    if not torch.equal(segment_BL[:, :, None] == segment_BL[:, None], see_BLL):
        return None
    starts = first_BL.flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_tensor([first_BL.numel()]))).int()


def _flash_refusal(query: Tensor, masked: bool) -> str:
    if find_spec("flash_attn") is None:
        return "is not installed"
    if query.device.type != "cuda":
        return f"needs a GPU, not {query.device.type}"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in float16 or bfloat16, not {str(query.dtype).removeprefix('torch.')}"
    return "supports block-diagonal masks only" if masked else ""
