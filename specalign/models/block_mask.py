"""Which positions the blocks of packed rows see: those of its document before its anchor, and all of
its own block. Dense for CPUs; on a GPU for flex_attention, which skips what no query of a tile sees.
"""

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

KeysValues = tuple[Tensor, Tensor]
Sight = Tensor | BlockMask | None
"""What A blocks see of L positions of a context: bool (B, A, L), of which each also sees its own
block; a mask of A·R queries over the L positions and all A·R rows; None = the whole context."""


def see_context(document_BL: Tensor, index_BA: Tensor) -> Tensor:
    """Which positions of its row each block sees, bool (B, A, L)."""
    places = torch.arange(document_BL.shape[1], device=index_BA.device)
    same = document_BL[:, None, :] == document_BL.gather(1, index_BA)[..., None]
    return (places < index_BA[..., None]) & same


def make_sight_rule(document_BL: Tensor, index_BA: Tensor, size: int) -> Callable[..., Tensor]:
    """The same and each block's own rows, as a rule for flex_attention: (row, head, query, key) →
    bool. Queries: the blocks' rows, `size` each; keys: the context's, then those rows."""
    length = document_BL.shape[1]
    document_BA = document_BL.gather(1, index_BA)

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        anchor = query // size
        place = key.clamp(max=length - 1)
        same = document_BL[row, place] == document_BA[row, anchor]
        own = key - length - anchor * size
        return ((key < index_BA[row, anchor]) & same) | ((own >= 0) & (own < size))

    return sees


def make_sparse_mask(document_BL: Tensor, index_BA: Tensor, size: int) -> BlockMask:
    """The mask of all blocks of packed rows."""
    (rows, length), queries = document_BL.shape, index_BA.shape[1] * size
    device = index_BA.device
    rule = make_sight_rule(document_BL, index_BA, size)
    create = _compiled_on_gpu(create_block_mask, device.type)
    mask: BlockMask = create(rule, rows, None, queries, length + queries, device)
    return mask


def attend_sparsely(
    q: Tensor, own: KeysValues, context: KeysValues, mask: BlockMask, scale: float
) -> Tensor:
    """Attention of A blocks of R rows: queries (B, A, H, R, d), own keys and values (B, A, Hkv, R,
    d), the context's (B, Hkv, L, d) → (B, A, R, H·d)."""
    anchors, heads, size = q.shape[1:4]
    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
    together = (
        torch.cat((c, x.transpose(1, 2).flatten(2, 3)), 2)
        for c, x in zip(context, own, strict=True)
    )
    keys, values = (x.to(dtype) for x in together)
    queries = q.transpose(1, 2).flatten(2, 3).to(dtype)
    attend, is_grouped = _compiled_on_gpu(flex_attention, q.device.type), heads != keys.shape[1]
    out: Tensor = attend(queries, keys, values, block_mask=mask, scale=scale, enable_gqa=is_grouped)
    return out.unflatten(2, (anchors, size)).permute(0, 2, 3, 1, 4).flatten(-2)


@cache
def _compiled_on_gpu(function: Callable[..., Any], kind: str) -> Callable[..., Any]:
    """Compiled, neither function makes a matrix of all queries and keys."""
    return torch.compile(function) if kind == "cuda" else function


@cache
def can_attend_sparsely(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, value: int
) -> bool:
    """Whether flex_attention runs on this device with these heads, forward and backward; warns if
    it fails on a GPU."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    try:
        document_BL = torch.zeros(1, 256, dtype=torch.int64, device=device)
        mask = make_sparse_mask(document_BL, torch.arange(1, 65, device=device)[None], 4)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)

        own = random(1, 64, kv_heads, 4, width), random(1, 64, kv_heads, 4, value)
        context = random(1, kv_heads, 256, width), random(1, kv_heads, 256, value)
        q = random(1, 64, heads, 4, width)
        with torch.enable_grad():
            attend_sparsely(q, own, context, mask, width**-0.5).sum().backward()
        return bool(q.grad.isfinite().all()) if q.grad is not None else False
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Dynamo, Inductor, Triton or the compiler that it calls
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"dense attention on this GPU, therefore slower: {why[:160]}", stacklevel=2)
        return False
