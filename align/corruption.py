"""The forward process over rows of text: which positions are noisy, and how.

Block drafters: a clean anchor, then K−1 absorbed positions, at random places of a row. Every anchor sees the clean
text before it; its own block holds the anchor token and masks (DFlash, arXiv 2602.06036: anchor clean, rest masked,
context strictly before the anchor, blocks invisible to each other). Standalone drafters: K positions after the anchor,
or all of a document after its prefix, hit by the noise of a time that was drawn for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from align.data import Batch
from align.errors import UserError
from align.graphs import Graph
from align.schedules import Schedule, draw_times


@dataclass
class Anchors:
    """`index_BA`: where each block's clean token lies in its row; row k of the block predicts the token at index+1+k.

    `valid_BAK` marks the predictions that count: inside the anchor's document and its answer, with no gap before them.
    """

    index_BA: Tensor
    valid_BAK: Tensor

    @property
    def block_size(self) -> int:
        return self.valid_BAK.shape[2]

    def places_BAK(self, length: int) -> Tensor:
        """Row index of the position whose target distribution predicts each drafted token: anchor + k, kept in range."""
        steps = torch.arange(self.block_size, device=self.index_BA.device)
        return (self.index_BA[..., None] + steps).clamp_max(length - 1)


def sample_anchors(batch: Batch, count: int, block_size: int, generator: torch.Generator) -> Anchors:
    """`count` distinct anchors a row, uniformly among those whose first drafted token belongs to an answer.

    A row with fewer places repeats one with nothing valid in it. An anchor is never a document's first token: the
    drafter needs the target's hidden state before it.
    """
    length = batch.tokens_BL.shape[1]
    same_next = torch.zeros_like(batch.answer_BL)
    same_next[:, :-1] = (batch.document_BL[:, 1:] == batch.document_BL[:, :-1]) & batch.answer_BL[:, 1:]
    allowed = same_next & (batch.positions_BL > 0) & (batch.document_BL >= 0)
    noise = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1.0)
    top = noise.topk(min(count, length), dim=1)
    index = top.indices.sort(dim=1).values
    real = torch.gather(allowed, 1, index)
    steps = index[..., None] + 1 + torch.arange(block_size)
    inside = steps < length
    steps = steps.clamp_max(length - 1)
    flat = steps.flatten(1)
    document = torch.gather(batch.document_BL, 1, flat).view_as(steps)
    answer = torch.gather(batch.answer_BL, 1, flat).view_as(steps)
    own = torch.gather(batch.document_BL, 1, index)[..., None]
    valid = (inside & answer & (document == own) & real[..., None]).long().cumprod(-1).bool()
    return Anchors(index, valid)


@dataclass
class Corrupted:
    """What a standalone drafter reads and has to undo: blocks (B, A, K) with times (B, A), or rows (B, L) with times (B,).

    `valid` marks the positions that noise could reach and the loss counts; `tokens_0` is the clean text. σ at every
    position is `schedule.total(times)[..., None]`.
    """

    tokens_t: Tensor
    tokens_0: Tensor
    times: Tensor
    valid: Tensor


def block_times(
    anchors: Anchors, generator: torch.Generator, how: str = "low_discrepancy", least: float = 1e-3
) -> Tensor:
    """A time for every block, (B, A), in [least, 1]; `how` is one of `schedules.TIMES`."""
    index_BA = anchors.index_BA
    return draw_times(index_BA.numel(), how, generator, least, index_BA.device).view_as(index_BA)


def block_lengths(anchors: Anchors, weights: Sequence[float], generator: torch.Generator) -> Tensor:
    """A length for every block, (B, A), 1..K: length k with a chance proportional to weights[k−1].

    Raises:
        UserError: not K weights, a negative one, or none above 0.
    """
    size = anchors.block_size
    law = torch.tensor(list(weights), dtype=torch.float64, device=generator.device)
    if len(law) != size:
        raise UserError(
            f"block lengths: {len(law)} weights for blocks of {size}; give one for each length 1..{size}"
        )
    if not bool((law >= 0).all()) or not 0 < float(law.sum()) < float("inf"):
        raise UserError(f"block lengths: weights {list(weights)} must be at least 0, finite, and not all 0")
    index_BA = anchors.index_BA
    drawn = law.multinomial(index_BA.numel(), replacement=True, generator=generator)
    return (drawn + 1).to(index_BA.device).view_as(index_BA)


def corrupt_blocks(
    batch: Batch,
    anchors: Anchors,
    graph: Graph,
    schedule: Schedule,
    length_weights: Sequence[float],
    generator: torch.Generator,
    how: str = "low_discrepancy",
    least: float = 1e-3,
) -> Corrupted:
    """The K tokens after every anchor, hit by noise up to a drawn length (`block_lengths`) at a drawn time.

    Positions that are not valid, beyond the length or by `anchors`, hold a draw from the graph's limit: the mask.
    """
    times_BA = block_times(anchors, generator, how, least)
    lengths_BA = block_lengths(anchors, length_weights, generator)
    steps = torch.arange(anchors.block_size, device=lengths_BA.device)
    valid_BAK = anchors.valid_BAK & (steps < lengths_BA[..., None])
    places = (anchors.index_BA[..., None] + 1 + steps).clamp_max(batch.tokens_BL.shape[1] - 1)
    tokens_BAK = torch.gather(batch.tokens_BL, 1, places.flatten(1)).view_as(places)
    noisy = graph.corrupt(tokens_BAK, schedule.total(times_BA)[..., None], generator, may=valid_BAK)
    limit = graph.limit(tokens_BAK.shape, generator).to(tokens_BAK.device)
    return Corrupted(torch.where(valid_BAK, noisy, limit), tokens_BAK, times_BA, valid_BAK)


def random_prefixes(batch: Batch, generator: torch.Generator) -> Tensor:
    """A prefix length for every document, (B, L) by document number: uniform over 0..its length − 1."""
    real = batch.document_BL >= 0
    lengths = torch.zeros_like(batch.document_BL).scatter_add(1, batch.document_BL.clamp_min(0), real.long())
    u = torch.rand(lengths.shape, generator=generator, dtype=torch.float64, device=generator.device)
    return (u.to(lengths.device) * lengths).long()


def corrupt_suffix(
    batch: Batch,
    graph: Graph,
    schedule: Schedule,
    prefix_BN: Tensor,
    generator: torch.Generator,
    how: str = "low_discrepancy",
    least: float = 1e-3,
) -> Corrupted:
    """Whole rows, as SEDD pretrains, but for a clean prefix of every document; one time a row, as its network takes it.

    Args:
        prefix_BN: clean tokens at the start of each document, by its number in the row; zeros corrupt everything,
            `random_prefixes` draws them. Prefix and padding keep their tokens and are not valid.
    """
    times_B = draw_times(len(batch.tokens_BL), how, generator, least, batch.tokens_BL.device)
    prefix_BL = torch.gather(prefix_BN, 1, batch.document_BL.clamp_min(0))
    valid_BL = (batch.document_BL >= 0) & (batch.positions_BL >= prefix_BL)
    noisy = graph.corrupt(batch.tokens_BL, schedule.total(times_B)[:, None], generator, may=valid_BL)
    return Corrupted(noisy, batch.tokens_BL, times_B, valid_BL)
