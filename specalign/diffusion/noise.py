"""The forward process over packed rows: which tokens are masked, and at which time.

Block drafters read a clean anchor followed by masks, at random places of a row (DFlash, arXiv
2602.06036); a block may also show some tokens after its anchor (D²SD). Standalone drafters: every
token is masked with probability 1 − e^(−σ(t)) at a drawn time t.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from specalign.common.batch import Anchors, Batch, Corrupted
from specalign.diffusion.schedules import Schedule

Times = Literal["low_discrepancy", "count"]
LEAST_TIME = 1e-3
"""Of the times that are drawn."""
LOG_ZERO = -1e4
"""Stands for log 0: finite, so that 0·log 0 stays 0."""


def sample_anchors(
    batch: Batch, count: int, block_size: int, generator: torch.Generator
) -> Anchors:
    """`count` distinct anchors per row, drawn uniformly.

    An anchor's next token belongs to an answer of its document, and it is not the document's first
    token: the drafter needs the target's hidden state before it. A row with fewer such places gets
    further anchors without valid positions.
    """
    length = batch.tokens_BL.shape[1]
    allowed = torch.zeros_like(batch.answer_BL)
    same = batch.document_BL[:, 1:] == batch.document_BL[:, :-1]
    allowed[:, :-1] = same & batch.answer_BL[:, 1:]
    allowed &= (batch.positions_BL > 0) & (batch.document_BL >= 0)
    noise = torch.rand(allowed.shape, generator=generator).masked_fill(~allowed, -1.0)
    index = noise.topk(min(count, length), dim=1).indices.sort(dim=1).values
    steps = index[..., None] + 1 + torch.arange(block_size)
    inside = steps < length
    flat = steps.clamp_max(length - 1).flatten(1)
    answer = batch.answer_BL.gather(1, flat).view_as(steps)
    document = batch.document_BL.gather(1, flat).view_as(steps)
    valid = inside & answer & allowed.gather(1, index)[..., None]
    valid &= document == batch.document_BL.gather(1, index)[..., None]
    return Anchors(index, valid.long().cumprod(-1).bool())


def clean_prefixes(
    anchors: Anchors, decay: float, length: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """How many tokens after its anchor each block shows, (B, A): j with probability ∝ decay^j over
    0..n−1 for a block with n valid positions (D²SD, arXiv 2606.04446, uses 0.9). The draw depends
    on the anchor's place in its row of `length` tokens and on the row's generator alone."""
    u_BL = torch.stack(
        [torch.rand(length, generator=g, dtype=torch.float64, device=g.device) for g in generators]
    )
    u_BA = u_BL.to(anchors.index_BA.device).gather(1, anchors.index_BA)
    most_BA = (anchors.valid_BAK.sum(-1) - 1).clamp_min(0)
    steps = torch.arange(anchors.block_size, device=u_BA.device, dtype=torch.float64)
    running_K = (decay**steps).cumsum(0)
    drawn_BA = torch.searchsorted(running_K, u_BA * running_K[most_BA], right=True)
    return torch.minimum(drawn_BA, most_BA)


def van_der_corput(count: int, first: int = 0) -> Tensor:
    """0, 1/2, 1/4, 3/4, 1/8, …: the mirrored binary digits of `first`, `first` + 1, …; float64."""
    index = torch.arange(first, first + count)
    value = torch.zeros(count, dtype=torch.float64)
    for bit in range((first + count).bit_length()):
        value += (index >> bit & 1) * 2.0 ** -(bit + 1)
    return value


def mask_tokens(
    tokens: Tensor,
    valid: Tensor,
    mask_id: int,
    schedule: Schedule,
    generator: torch.Generator,
    how: Times,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mask clean tokens (…, K) where `valid`: noisy tokens, times (…,), importance weights (…,).

    Args:
        how: `low_discrepancy`: times between `LEAST_TIME` and 1, evenly spread (the van der Corput
            sequence, shifted by one draw); tokens are masked independently. `count`: the number of
            masks is drawn uniformly over 1..the number of valid positions, then their places, then
            a matching time (as LLaDA, arXiv 2502.09992, evaluates likelihoods). The loss keeps its
            mean, up to the share of noise beyond t = 1, with much less variance.
        u: the quantile in 0..1 of each time or number; None = drawn.
    """
    device, shape = valid.device, valid.shape[:-1]

    def draw(size: Sequence[int]) -> Tensor:
        return torch.rand(size, generator=generator, dtype=torch.float64, device=generator.device)

    if u is None:
        spread = van_der_corput(shape.numel()).to(generator.device)
        u = (draw((1,)) + spread) % 1
    u = u.to(device).view(shape)
    if how == "low_discrepancy":
        times = (LEAST_TIME + (1 - LEAST_TIME) * u).float()
        chance = schedule.mask_probability(times)[..., None]
        drawn = torch.rand(tokens.shape, generator=generator, device=generator.device).to(device)
        noisy = torch.where((drawn < chance) & valid, mask_id, tokens)
        return noisy, times, torch.ones_like(times)
    # A position is masked once the masked share m passes its own uniform threshold. The l-th of
    # them goes at the l-th smallest threshold: m is then Beta(l, L-l+1), and with l uniform every
    # term of the bound has weight L/l.
    total = valid.sum(-1)
    masks = (u * total).long().clamp_max((total - 1).clamp_min(0))
    own = draw(valid.shape).to(device).masked_fill(~valid, 1.0)
    threshold = own.sort(-1).values.gather(-1, masks[..., None])
    noisy = torch.where(valid & (own <= threshold), mask_id, tokens)
    times = schedule.time(-torch.log1p(-threshold[..., 0])).clamp(0.0, 1.0)
    importance = total / (masks + 1) / schedule.weight(times)
    return noisy, times.float(), torch.where(total > 0, importance, 1.0).float()


def corrupt_blocks(
    batch: Batch,
    anchors: Anchors,
    mask_id: int,
    schedule: Schedule,
    length_weights: Sequence[float],
    generator: torch.Generator,
    how: Times = "low_discrepancy",
) -> Corrupted:
    """Mask the K tokens after every anchor, up to a drawn length, at a drawn time (`mask_tokens`).
    Length k of 1..K has probability ∝ length_weights[k−1]. Positions that are not valid hold
    masks."""
    index_BA = anchors.index_BA
    weights_K = torch.tensor(list(length_weights), dtype=torch.float64, device=generator.device)
    drawn = weights_K.multinomial(index_BA.numel(), replacement=True, generator=generator)
    lengths_BA = (drawn + 1).to(index_BA.device).view_as(index_BA)
    steps = torch.arange(anchors.block_size, device=index_BA.device)
    valid_BAK = anchors.valid_BAK & (steps < lengths_BA[..., None])
    tokens_BAK = anchors.blocks_BAK(batch.tokens_BL)
    noisy, times_BA, importance_BA = mask_tokens(
        tokens_BAK, valid_BAK, mask_id, schedule, generator, how
    )
    noisy = torch.where(valid_BAK, noisy, mask_id)
    return Corrupted(noisy, tokens_BAK, times_BA, valid_BAK, importance_BA)


def random_prefixes(batch: Batch, generator: torch.Generator) -> Tensor:
    """A prefix length for every document, (B, L) by its number: uniform over 0..its length − 1."""
    real = batch.document_BL >= 0
    lengths = torch.zeros_like(batch.document_BL).scatter_add(
        1, batch.document_BL.clamp_min(0), real.long()
    )
    u = torch.rand(lengths.shape, generator=generator, dtype=torch.float64, device=generator.device)
    return (u.to(lengths.device) * lengths).long()


def corrupt_suffix(
    batch: Batch,
    mask_id: int,
    schedule: Schedule,
    prefix_BN: Tensor,
    generator: torch.Generator,
    how: Times = "low_discrepancy",
    u_B: Tensor | None = None,
) -> Corrupted:
    """Mask whole rows as in SEDD's pretraining, after each document's clean prefix.

    prefix_BN: clean tokens at the start of each document, by its number in the row; they and
    padding are not valid. u_B: the quantile in 0..1 of each row's time; None = drawn.
    """
    prefix_BL = prefix_BN.gather(1, batch.document_BL.clamp_min(0))
    valid_BL = (batch.document_BL >= 0) & (batch.positions_BL >= prefix_BL)
    noisy, times_B, importance_B = mask_tokens(
        batch.tokens_BL, valid_BL, mask_id, schedule, generator, how, u_B
    )
    return Corrupted(noisy, batch.tokens_BL, times_B, valid_BL, importance_B)
