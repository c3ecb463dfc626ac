"""The forward process over rows of text: which positions are noisy, and how.

Block drafters: a clean anchor followed by masked positions, at random places of a row (DFlash,
arXiv 2602.06036); a variable-prefix drafter's block also shows some tokens after the anchor (D²SD).
Standalone drafters: the K positions after the anchor, or all of a document after its prefix, get
the noise of a time drawn for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specalign.common.batch import Anchors, Batch, Corrupted
from specalign.common.errors import UserError
from specalign.diffusion.graphs import Absorbing, Graph
from specalign.diffusion.parameterization import time_weight
from specalign.diffusion.schedules import Schedule, draw_times, from_least


def may_anchor(batch: Batch) -> Tensor:
    """Bool (B, L): places inside a document, not its first, whose next token belongs to an
    answer."""
    same_next = torch.zeros_like(batch.answer_BL)
    same_next[:, :-1] = (batch.document_BL[:, 1:] == batch.document_BL[:, :-1]) & batch.answer_BL[
        :, 1:
    ]
    return same_next & (batch.positions_BL > 0) & (batch.document_BL >= 0)


def sample_anchors(
    batch: Batch,
    count: int,
    block_size: int,
    generator: torch.Generator,
    per_document: bool = False,
) -> Anchors:
    """`count` distinct anchors per row, or per document, uniformly among those of `may_anchor`.

    A row with fewer such places gets further anchors without valid positions. An anchor is never a
    document's first token: the drafter needs the target's hidden state before it.
    """
    length = batch.tokens_BL.shape[1]
    allowed = may_anchor(batch)
    noise = torch.rand(allowed.shape, generator=generator, dtype=torch.float32).masked_fill(
        ~allowed, -1.0
    )
    if per_document:
        allowed = _first_of_each(noise, allowed, batch.document_BL, count)
        noise, count = noise.masked_fill(~allowed, -1.0), max(int(allowed.sum(1).max()), 1)
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


def _first_of_each(noise_BL: Tensor, allowed_BL: Tensor, document_BL: Tensor, count: int) -> Tensor:
    """The `count` allowed places with the highest noise in every document, bool (B, L)."""
    kept_BL = torch.zeros_like(allowed_BL)
    for noise, allowed, document, kept in zip(
        noise_BL, allowed_BL, document_BL, kept_BL, strict=True
    ):
        for own in document[allowed].unique():
            places = (allowed & (document == own)).nonzero()[:, 0]
            kept[places[noise[places].topk(min(count, len(places))).indices]] = True
    return kept_BL


def clean_prefixes(
    anchors: Anchors, decay: float, length: int, generators: Sequence[torch.Generator]
) -> Tensor:
    """How many tokens after its anchor each block shows, (B, A): j with probability ∝ decay^j, 0 <
    decay ≤ 1, over j = 0..n−1 for a block with n valid positions (D²SD, arXiv 2606.04446, uses
    0.9).

    Args:
        length: L. The draw depends on the anchor's place in its row, so that it does not depend on
            the other rows.
        generators: one per row.
    """
    u_BL = torch.stack(
        [torch.rand(length, generator=g, dtype=torch.float64, device=g.device) for g in generators]
    )
    u_BA = u_BL.to(anchors.index_BA.device).gather(1, anchors.index_BA)
    most_BA = (anchors.valid_BAK.sum(-1) - 1).clamp_min(0)
    steps = torch.arange(anchors.block_size, device=u_BA.device, dtype=torch.float64)
    running_K = (decay**steps).cumsum(0)
    drawn_BA = torch.searchsorted(running_K, u_BA * running_K[most_BA], right=True)
    return torch.minimum(drawn_BA, most_BA)


def apply_noise(
    tokens: Tensor,
    valid: Tensor,
    graph: Graph,
    schedule: Schedule,
    generator: torch.Generator,
    how: str,
    least: float,
    u: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Corrupt clean tokens (…, K) where `valid`: noisy tokens (…, K), times (…,) and importance
    weights (…,).

    `how`, `least`: as in `corrupt_blocks`. `u`: the quantile in 0..1 of each time, or of each
    number of masks; None = drawn."""
    count, shape, device = valid[..., 0].numel(), valid.shape[:-1], valid.device
    if u is None:
        u = draw_times(
            count, "low_discrepancy" if how == "count" else how, generator, 0.0, dtype=torch.float64
        )
    u = u.to(device).view(shape)
    if how != "count":
        times = from_least(u, least).float()
        noisy = graph.corrupt(tokens, schedule.total(times)[..., None], generator, may=valid)
        return noisy, times, torch.ones_like(times)
    if not isinstance(graph, Absorbing):
        raise UserError(
            "times='count' counts masks, and the uniform graph has none; use low_discrepancy"
        )
    # A position is masked once the masked share m passes its own uniform threshold. The l-th of
    # them goes at the l-th smallest threshold: m is then Beta(l, L-l+1), and with l uniform every
    # term of the bound has weight L/l.
    total = valid.sum(-1)
    masks = (u * total).long().clamp_max((total - 1).clamp_min(0))
    own = torch.rand(valid.shape, generator=generator, dtype=torch.float64, device=generator.device)
    own = own.to(device).masked_fill(~valid, 1.0)
    threshold = own.sort(-1).values.gather(-1, masks[..., None])
    noisy = torch.where(valid & (own <= threshold), graph.mask_id, tokens)
    times = schedule.time(-torch.log1p(-threshold[..., 0])).clamp(0.0, 1.0)
    weight = time_weight(schedule.total(times), schedule.rate(times))
    importance = total / (masks + 1) / weight
    return noisy, times.float(), torch.where(total > 0, importance, 1.0).float()


def block_lengths(anchors: Anchors, weights: Sequence[float], generator: torch.Generator) -> Tensor:
    """A length for every block, (B, A), 1..K: length k with probability proportional to
    weights[k−1].

    Raises:
        UserError: not K weights, a negative one, or none above 0.
    """
    size = anchors.block_size
    weight_K = torch.tensor(list(weights), dtype=torch.float64, device=generator.device)
    if len(weight_K) != size:
        raise UserError(
            f"block lengths: {len(weight_K)} weights for blocks of {size}; give one for each "
            f"length 1..{size}"
        )
    if not bool((weight_K >= 0).all()) or not 0 < float(weight_K.sum()) < float("inf"):
        raise UserError(
            f"block lengths: weights {list(weights)} must be at least 0, finite, and not all 0"
        )
    index_BA = anchors.index_BA
    drawn = weight_K.multinomial(index_BA.numel(), replacement=True, generator=generator)
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
    """Corrupt the K tokens after every anchor, up to a drawn length (`block_lengths`), at a drawn
    time.

    Positions that are not valid (beyond the length, or by `anchors`) hold a draw from the graph's
    stationary distribution, the mask for the absorbing graph.

    Args:
        how: `uniform`, `antithetic`, `low_discrepancy`: a time between `least` and 1
            (`draw_times`); tokens are corrupted independently. `count`, absorbing only: the number
            of masks is drawn uniformly over 1..the block's length, then their places, then a
            matching time (as LLaDA, arXiv 2502.09992, evaluates likelihoods). The loss keeps its
            mean (up to the share ε of noise beyond t = 1) with much less variance: its weights are
            at most the length.
    """
    lengths_BA = block_lengths(anchors, length_weights, generator)
    steps = torch.arange(anchors.block_size, device=lengths_BA.device)
    valid_BAK = anchors.valid_BAK & (steps < lengths_BA[..., None])
    tokens_BAK = anchors.blocks_BAK(batch.tokens_BL)
    noisy, times_BA, importance_BA = apply_noise(
        tokens_BAK, valid_BAK, graph, schedule, generator, how, least
    )
    limit = graph.limit(tokens_BAK.shape, generator).to(tokens_BAK.device)
    return Corrupted(
        torch.where(valid_BAK, noisy, limit), tokens_BAK, times_BA, valid_BAK, importance_BA
    )


def random_prefixes(batch: Batch, generator: torch.Generator) -> Tensor:
    """A prefix length for every document, (B, L) by document number: uniform over 0..its length −
    1."""
    real = batch.document_BL >= 0
    lengths = torch.zeros_like(batch.document_BL).scatter_add(
        1, batch.document_BL.clamp_min(0), real.long()
    )
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
    u_B: Tensor | None = None,
) -> Corrupted:
    """Corrupt whole rows as in SEDD's pretraining, after each document's clean prefix; one time per
    row.

    Args:
        prefix_BN: clean tokens at the start of each document, by its number in the row; zeros
            corrupt everything, `random_prefixes` draws them. Prefix and padding keep their tokens
            and are not valid.
        u_B: the quantile in 0..1 of each row's time; None = drawn, for these rows together.
    """
    prefix_BL = torch.gather(prefix_BN, 1, batch.document_BL.clamp_min(0))
    valid_BL = (batch.document_BL >= 0) & (batch.positions_BL >= prefix_BL)
    noisy, times_B, importance_B = apply_noise(
        batch.tokens_BL, valid_BL, graph, schedule, generator, how, least, u_B
    )
    return Corrupted(noisy, batch.tokens_BL, times_B, valid_BL, importance_B)
