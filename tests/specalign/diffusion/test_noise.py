"""Noisy blocks and rows for standalone drafters: what changes, how often, and what never does."""

import math

import pytest
import torch

from specalign.common.batch import Anchors, Batch, Corrupted
from specalign.diffusion.noise import (
    corrupt_blocks,
    corrupt_suffix,
    random_prefixes,
    sample_anchors,
    van_der_corput,
)
from specalign.diffusion.schedules import Geometric, LogLinear, Schedule

MASK, PAD = 37, 38


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def packed(rows: int = 6, seed: int = 0) -> Batch:
    """Rows of two documents (14 and 12 tokens, answers from their 4th on) and 6 of padding."""
    g = generator(seed)
    document = torch.cat([torch.zeros(14), torch.ones(12), -torch.ones(6)]).long()
    positions = torch.cat([torch.arange(14), torch.arange(12), torch.zeros(6, dtype=torch.int64)])
    tokens = torch.randint(0, 37, (rows, 32), generator=g)
    tokens[:, 26:] = PAD
    answer = (document >= 0) & (positions >= 4)
    every_row = (x.expand(rows, -1).contiguous() for x in (positions, document, answer))
    return Batch(tokens, *every_row)


def blocks(batch: Batch, anchors: Anchors, weights: list[float], seed: int = 0) -> Corrupted:
    return corrupt_blocks(batch, anchors, MASK, LogLinear(), weights, generator(seed))


def test_blocks_hold_the_tokens_after_their_anchor() -> None:
    """Never a prompt, padding or another document, without gaps; what is masked is masked at random."""
    batch = packed()
    anchors = sample_anchors(batch, 7, 5, generator(1))
    noisy = blocks(batch, anchors, [1.0, 0.0, 2.0, 1.0, 1.0])
    assert noisy.tokens_t.shape == noisy.tokens_0.shape == noisy.valid.shape == (6, 7, 5)
    for b, a in anchors.valid_BAK[..., 0].nonzero().tolist():
        start = int(anchors.index_BA[b, a])
        assert int(batch.positions_BL[b, start]) > 0
        for k, valid in enumerate(anchors.valid_BAK[b, a].tolist()):
            place = start + 1 + k
            own = place < 32 and bool(batch.document_BL[b, place] == batch.document_BL[b, start])
            assert valid == (own and bool(batch.answer_BL[b, start + 1 : place + 1].all()))
            if valid:
                assert noisy.tokens_0[b, a, k] == batch.tokens_BL[b, place]
    assert not bool((noisy.valid & ~anchors.valid_BAK).any())
    assert torch.equal(noisy.valid, torch.arange(5) < noisy.valid.sum(-1)[..., None])
    assert bool((noisy.tokens_t[~noisy.valid] == MASK).all())
    kept = noisy.tokens_t != MASK
    assert torch.equal(noisy.tokens_t[kept], noisy.tokens_0[kept]) and bool(kept.any())


def everywhere(rows: int, count: int, size: int) -> tuple[Batch, Anchors]:
    """One long document a row and blocks that fit entirely."""
    tokens = torch.randint(0, 37, (rows, count + size), generator=generator(5))
    positions = torch.arange(count + size).expand(rows, -1).contiguous()
    batch = Batch(tokens, positions, torch.zeros_like(tokens), torch.ones_like(tokens).bool())
    index = torch.arange(count).expand(rows, -1).contiguous()
    return batch, Anchors(index, torch.ones(rows, count, size, dtype=torch.bool))


def test_lengths_have_their_distribution() -> None:
    batch, anchors = everywhere(40, 100, 4)
    weights = [3.0, 0.0, 1.0, 4.0]
    lengths = blocks(batch, anchors, weights, seed=3).valid.sum(-1)
    shares = lengths.flatten().bincount(minlength=5)[1:] / lengths.numel()
    expected = torch.tensor(weights) / sum(weights)
    assert bool(((shares - expected).abs() <= 4 * (expected * (1 - expected) / 4000).sqrt()).all())


def by_count(rows: int, weights: list[float], schedule: Schedule, seed: int = 9) -> Corrupted:
    batch, anchors = everywhere(rows, 400, len(weights))
    return corrupt_blocks(batch, anchors, MASK, schedule, weights, generator(seed), "count")


@pytest.mark.parametrize("schedule", [LogLinear(), Geometric()], ids=str)
def test_counted_masks_weigh_length_over_count(schedule: Schedule) -> None:
    noisy = by_count(20, [1.0, 2.0, 3.0, 4.0], schedule)
    length, masks = noisy.valid.sum(-1), (noisy.valid & (noisy.tokens_t == MASK)).sum(-1)
    assert bool((masks >= 1).all())
    found = schedule.weight(noisy.times.double()) * noisy.importance.double()
    torch.testing.assert_close(found, length.double() / masks, rtol=2e-4, atol=0.0)
    for size in range(1, 5):  # every count of masks as often as every other
        of_size = masks[length == size].bincount(minlength=size + 1)[1:].double()
        spread = (of_size - of_size.mean()).abs().max()
        assert float(spread) < 4 * math.sqrt(float(of_size.mean()))


def test_counted_masks_fall_anywhere_and_their_times_are_beta() -> None:
    """Given l of L: each set of places as likely, and the masked share Beta(l, L−l+1), whatever the set."""
    size, schedule = 4, LogLinear()
    noisy = by_count(60, [0, 0, 0, 1.0], schedule)
    sets = ((noisy.tokens_t == MASK).long() * 2 ** torch.arange(size)).sum(-1)
    share = schedule.mask_probability(noisy.times.double())
    for number in range(1, 2**size):
        own, masks = share[sets == number], number.bit_count()
        chance = 1 / size / math.comb(size, masks)
        assert abs(len(own) / sets.numel() - chance) < 4 * math.sqrt(chance / sets.numel())
        mean = masks / (size + 1)
        variance = mean * (1 - mean) / (size + 2)
        assert abs(float(own.mean()) - mean) < 4 * math.sqrt(variance / len(own))
        assert float(own.var()) == pytest.approx(variance, rel=0.25)


def test_prefix_and_padding_never_change() -> None:
    batch = packed(rows=50)
    prefix = torch.zeros(50, 32, dtype=torch.int64)
    prefix[:, 0], prefix[:, 1] = 5, 12  # the second document is all prefix
    noisy = corrupt_suffix(batch, MASK, LogLinear(), prefix, generator(1))
    valid = torch.zeros(50, 32, dtype=torch.bool)
    valid[:, 5:14] = True
    assert torch.equal(noisy.valid, valid) and noisy.times.shape == (50,)
    assert torch.equal(noisy.tokens_t[~valid], batch.tokens_BL[~valid])
    assert torch.equal(noisy.tokens_0, batch.tokens_BL)
    changed = (noisy.tokens_t != noisy.tokens_0)[:, 5:14].double().mean(1)
    late, early = noisy.times > 0.7, noisy.times < 0.3
    assert float(changed[late].mean()) > 0.6 and float(changed[early].mean()) < 0.4
    everything = corrupt_suffix(batch, MASK, LogLinear(), torch.zeros_like(prefix), generator(1))
    assert torch.equal(everything.valid, batch.document_BL >= 0)


def test_random_prefixes_are_uniform_and_leave_a_token() -> None:
    batch = packed(rows=3000)
    prefix = random_prefixes(batch, generator(4))
    for number, length in ((0, 14), (1, 12)):
        counts = prefix[:, number].bincount(minlength=length)
        assert len(counts) == length
        expected = 3000 / length
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < 35  # chi-square, 13 or 11 degrees of freedom, 0.1%
    assert bool((prefix[:, 2:] == 0).all())
    noisy = corrupt_suffix(batch, MASK, LogLinear(), prefix, generator(4))
    assert torch.equal(noisy.valid[:, :14].sum(1), 14 - prefix[:, 0])
    assert torch.equal(noisy.valid[:, 14:26].sum(1), 12 - prefix[:, 1])


def test_times_are_uniform_and_spread() -> None:
    """Any aligned run of 8 has one time in each eighth, up to the common shift."""
    assert van_der_corput(4, 1).tolist() == [0.5, 0.25, 0.75, 0.125]
    batch, anchors = everywhere(1, 64, 2)
    times = blocks(batch, anchors, [0.0, 1.0], seed=2).times.flatten().double()
    times = (times - 1e-3) / (1 - 1e-3)
    for start in range(0, 64, 8):
        run = ((times[start : start + 8] - times[0]) % 1).sort().values
        assert torch.equal((run * 8 + 1e-4).long() % 8, torch.arange(8))
    many = torch.stack([blocks(batch, anchors, [0, 1.0], seed).times for seed in range(300)])
    assert float(many[:, 0, 5].mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 * 300))
