"""The DDiT behind a cached clean prefix: what drafting computes is what the whole forward computes."""

from __future__ import annotations

import pytest
import torch

from align.models.ddit import DDiT, prefix_block_mask, prefix_block_positions
from align.target.cache import KVCache
from tests.builders import ddit as network
from tests.builders import random_tokens as tokens


def none(rows: int) -> torch.Tensor:
    return torch.empty(rows, 0, dtype=torch.int64)


def extend(net: DDiT, clean: torch.Tensor, cache: KVCache) -> None:
    """Clean tokens alone."""
    net.denoise(clean, none(len(clean)), torch.zeros(len(clean)), cache)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["prefix_causal", "block_causal"])
def test_cached_drafting_is_one_full_forward(attention: str) -> None:
    """At every split point, for every noise level, twice from the same cache."""
    size = 3
    net = network(attention=attention, block_size=size if attention == "block_causal" else 0)
    text, noisy = tokens(2, 12), tokens(2, size, seed=7)
    step = size if attention == "block_causal" else 1
    for split in range(0, 13, step):
        cache = net.new_cache(2, 12 + size)
        if split:
            extend(net, text[:, :split], cache)
        assert cache.length == split
        total = split + size
        see = torch.ones(total, total, dtype=torch.bool)
        if attention == "prefix_causal":
            see = see.tril()
            see[split:] = True
        else:
            block = torch.arange(total) // size
            see = block[:, None] >= block
        for level in (0.2, 3.0):
            sigma_BL = torch.cat((torch.zeros(2, split), torch.full((2, size), level)), dim=1)
            full = net(torch.cat((text[:, :split], noisy), dim=1), sigma_BL, see=see[None, None])
            drafted = net.denoise(none(2), noisy, torch.full((2,), level), cache)
            assert cache.length == split
            if split > step:  # the last clean tokens along with the block
                cache.length = split - step
                clean = text[:, split - step : split]
                together = net.denoise(clean, noisy, torch.full((2,), level), cache)
                assert cache.length == split
                torch.testing.assert_close(together, drafted, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(drafted, full[:, split:], atol=1e-5, rtol=1e-5)
        if attention == "block_causal":  # the config's own attention says the same
            full = net(torch.cat((text[:, :split], noisy), dim=1), sigma_BL)
            torch.testing.assert_close(drafted, full[:, split:], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["prefix_causal", "block_causal"])
def test_several_extends_are_one(attention: str) -> None:
    blocks = attention == "block_causal"
    net = network(attention=attention, block_size=2 if blocks else 0)
    text, noisy, sigma = tokens(1, 12), tokens(1, 2, seed=9), torch.tensor([1.3])
    once, often = net.new_cache(1, 16), net.new_cache(1, 16)
    extend(net, text, once)
    start = 0
    for width in (2, 4, 2, 4) if blocks else (1, 5, 2, 1, 3):
        net.denoise(text[:, start : start + width], noisy, sigma, often)  # scribbles behind the prefix alone
        start += width
    assert once.length == often.length == 12
    for i in range(2):
        torch.testing.assert_close(often.k(i), once.k(i), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(often.v(i), once.v(i), atol=1e-5, rtol=1e-5)
    often.length = 8  # a rollback, and on with other text
    once.length = 0
    other = torch.cat((text[:, :8], tokens(1, 4, seed=11)), dim=1)
    extend(net, other, once)
    extend(net, other[:, 8:], often)
    torch.testing.assert_close(
        net.denoise(none(1), noisy, sigma, often),
        net.denoise(none(1), noisy, sigma, once),
        atol=1e-5,
        rtol=1e-5,
    )


@torch.no_grad()
def test_chosen_rows_of_a_cached_block() -> None:
    net = network(attention="prefix_causal")
    cache = net.new_cache(1, 10)
    extend(net, tokens(1, 6), cache)
    noisy, sigma = tokens(1, 4, seed=3), torch.tensor([0.9])
    rows = net.head(net.hidden(noisy, sigma, cache=cache)[:, [0, 2]], sigma)
    torch.testing.assert_close(rows, net.denoise(none(1), noisy, sigma, cache)[:, [0, 2]])


def test_what_a_cache_can_not_do() -> None:
    rows, sigma = tokens(1, 4), torch.tensor([0.5])
    net = network()
    with pytest.raises(ValueError, match="under full attention"):
        extend(net, rows, net.new_cache(1, 8))
    net = network(attention="prefix_causal")
    with pytest.raises(ValueError, match="no gradients"):
        net(rows, sigma, cache=net.new_cache(1, 8))
    with pytest.raises(ValueError, match="is full"):
        net.denoise(none(1), rows, sigma, net.new_cache(1, 3))
    net = network(attention="block_causal", block_size=3)
    with torch.no_grad(), pytest.raises(ValueError, match="longer than block_size=3"):
        net(rows, sigma, cache=net.new_cache(1, 8))
    cache = net.new_cache(1, 8)
    extend(net, rows, cache)
    assert cache.length == 3  # the block that has begun is not kept
    cache.length = 2
    with pytest.raises(ValueError, match="no whole blocks"):
        net.denoise(none(1), rows[:, :3], sigma, cache)


@torch.no_grad()
def test_training_rows_are_what_drafting_sees() -> None:
    """[clean row of packed documents, A noisy blocks] gives each block what cached drafting gives it."""
    net, size = network(attention="prefix_causal"), 3
    document = torch.tensor([[0] * 5 + [1] * 6 + [-1], [4] * 12])
    positions = torch.tensor([[*range(5), *range(6), 0], list(range(12))])
    anchors = torch.tensor([[0, 4, 5, 10], [3, 3, 7, 11]])
    clean, noisy = tokens(2, 12), tokens(2, 4, size, seed=2)
    level = torch.rand(2, 4, generator=torch.Generator().manual_seed(4)) * 3
    mask = prefix_block_mask(document, anchors, size)
    assert mask.shape == (2, 1, 24, 24)
    f = net(
        torch.cat((clean, noisy.flatten(1)), dim=1),
        torch.cat((torch.zeros(2, 12), level.repeat_interleave(size, dim=1)), dim=1),
        positions_BL=prefix_block_positions(positions, anchors, size),
        see=mask,
    )
    assert bool(torch.isfinite(f).all())
    blocks = f[:, 12:].unflatten(1, (4, size))
    for b in range(2):
        for a in range(4):
            anchor = int(anchors[b, a])
            mine = (document[b] == document[b, anchor]) & (torch.arange(12) <= anchor)
            cache = net.new_cache(1, 16)
            drafted = net.denoise(clean[b][mine][None], noisy[b, a][None], level[b, a][None], cache)
            torch.testing.assert_close(blocks[b, a], drafted[0], atol=1e-5, rtol=1e-5)


def test_prefix_block_mask_by_its_words() -> None:
    document = torch.tensor([[7, 7, 7, 2, 2, -1, -1]])
    anchors, size = torch.tensor([[1, 4]]), 2
    mask = prefix_block_mask(document, anchors, size)[0, 0]
    for q in range(11):
        for k in range(11):
            if q < 7:
                same = document[0, q] == document[0, k] and document[0, q] >= 0 if k < 7 else False
                expected = k < 7 and ((same and k <= q) or k == q)
            else:
                anchor = int(anchors[0, (q - 7) // size])
                if k < 7:
                    expected = bool(document[0, k] == document[0, anchor]) and k <= anchor
                else:
                    expected = (k - 7) // size == (q - 7) // size
            assert bool(mask[q, k]) == bool(expected), (q, k)
