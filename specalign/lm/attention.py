"""Attention of target and drafter: grouped queries without repeating keys, through SDPA.

`attend` is for our own networks, `biased_attention` for targets with capped
scores or sinks. Targets call these through `specalign.lm.interface`.

transformers repeats K and V for every query head as soon as a mask is given (9 heads read 3 times
the memory on SmolLM2). Here the query heads of a group become extra query rows of their shared key
head instead.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

WIDE = 64  # with more rows, repeating the keys is cheap next to the product


def block_mask(
    see_LL: Tensor | None,
    length: int,
    past: int,
    groups: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """The mask of `length` tokens that attend to `past` earlier ones and, by `see_LL`, to each
    other, made once for all layers.

    `see_LL`: bool, itself included; None = causal. Returns None for one token, which sees
    everything; for few, an additive mask in the order of the query rows of `grouped_attention`, (1,
    1, groups·L, S), so no layer has to convert it; else a boolean one, (1, 1, L, S).
    """
    if length == 1:
        return None
    return laid_out(visible_mask(see_LL, length, past, device), groups, dtype)


def visible_mask(see_LL: Tensor | None, length: int, past: int, device: torch.device) -> Tensor:
    """What each of `length` tokens attends to, bool (L, past + L): all of the past, and each other
    by `see_LL` (None: causal)."""
    see_LS = torch.ones(length, past + length, dtype=torch.bool, device=device)
    if see_LL is None:
        return see_LS.tril_(past)
    see_LS[:, past:] = see_LL
    return see_LS


def laid_out(see_LS: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """A mask, bool (L, S), in the form that is fastest for `grouped_attention`: for few tokens
    additive, by its query rows."""
    if groups == 1 or len(see_LS) > WIDE:
        return see_LS[None, None]
    added = torch.zeros(see_LS.shape, dtype=dtype, device=see_LS.device).masked_fill_(
        ~see_LS, -torch.inf
    )
    return added.repeat(groups, 1)[None, None]


def clean_then_noisy(clean: int, noisy: int, device: torch.device) -> Tensor:
    """Attention among clean tokens and a noisy block after them, bool (L, L): clean tokens are
    causal, the block attends to everything."""
    see_LL = torch.ones(clean + noisy, clean + noisy, dtype=torch.bool, device=device).tril()
    see_LL[clean:] = True
    return see_LL


def grouped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool = False,
) -> Tensor:
    """Attention of (B, H, L, d) queries over (B, Hkv, S, d) keys and values, H a multiple of Hkv →
    (B, H, L, d).

    `mask` is boolean (B or 1, 1, L, S), True = attend, or what `block_mask` made; None =
    everything, or causal when L = S and `causal`.
    """
    batch, heads, length, width = query.shape
    kv_heads, size = key.shape[1], key.shape[2]
    groups = heads // kv_heads
    if causal and mask is None and length > 1:
        mask = visible_mask(None, length, size - length, query.device)[None, None]
    if groups == 1 or length > WIDE:
        if groups > 1:
            key, value = (
                t[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for t in (key, value)
            )
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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, half-split, of (…, d) with tables that broadcast."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d)·v of (B, H, L, d) queries over (B, Hkv, S, d) keys → (B, H, L, d); `mask` as
    in `grouped_attention`, None = everything."""
    return grouped_attention(query, key, value, mask, query.shape[-1] ** -0.5)
