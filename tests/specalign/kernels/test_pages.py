"""Memory on large pages: the same numbers, at a line of the cache, and large pages where the system gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specalign.kernels import pages

GIVEN = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.parametrize(
    ("large", "advice"), [(False, "there"), (True, "there"), (True, "missing"), (True, "refused")]
)
def test_room_for_copies_lies_together(
    large: bool, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == "missing":  # another system than Linux
        monkeypatch.delattr("mmap.MADV_HUGEPAGE", raising=False)
    elif advice == "refused":  # a kernel without large pages
        monkeypatch.setattr("mmap.MADV_HUGEPAGE", 12345)
    given = [
        torch.randn(7, 5),
        torch.arange(3),
        torch.randn(4, 6).bfloat16().t(),
        torch.empty(0, 8),
    ]
    if large:
        given.append(torch.randn(pages.LARGE))
    copies = pages.together(given)
    for mine, theirs in zip(copies, given, strict=True):
        mine.copy_(theirs)
    for mine, theirs in zip(copies, given, strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype and mine.is_contiguous()
        assert mine.data_ptr() % pages.CACHE_LINE == 0
    assert copies[1].data_ptr() == copies[0].data_ptr() + 3 * pages.CACHE_LINE


@pytest.mark.skipif(
    not GIVEN.exists() or "[never]" in GIVEN.read_text(), reason="this system gives no large pages"
)
def test_large_pages_also_where_memory_was_given_back() -> None:
    """What malloc hands out again has ordinary pages already."""

    def large() -> int:
        smaps = Path("/proc/self/smaps_rollup").read_text()
        return int(smaps.split("AnonHugePages:")[1].split()[0])

    for _ in range(3):
        torch.ones(16 << 20, dtype=torch.uint8)
    before, room = large(), pages.allocate_untouched(16 << 20)
    room.fill_(1)
    assert large() - before >= 10 << 10  # KiB: the memory may be too scattered for some
