"""Standalone drafters: what training computes for a block is what decoding computes for it; stages, resume, recipes."""

from dataclasses import replace

import pytest
import torch

from specalign.diffusion.noise import corrupt_blocks, corrupt_suffix
from specalign.lm.model import Target
from specalign.models.diffusion_context import DiffusionContext
from tests.builders import ANCHORS
from tests.builders import DIFFUSION_KINDS as KINDS
from tests.builders import diffusion_drafter as drafter
from tests.builders import packed_batch as batch


@pytest.mark.parametrize("kind", KINDS)
def test_training_computes_what_decoding_computes(target: Target, kind: str) -> None:
    """Every noisy block of packed rows: the rows of a fresh context that holds its document up to the anchor."""
    made, rows = drafter(target, kind), batch(target)
    generator = torch.Generator().manual_seed(1)
    noisy = corrupt_blocks(rows, ANCHORS, made.mask_id, made.schedule, [0, 0, 1], generator)
    if made.cached:  # decoding tells σ from the share of masks
        share = (noisy.tokens_t == made.mask_id).double().mean(-1).float()
        noisy = replace(noisy, times=share)
    with torch.no_grad():
        hidden, sigma = made.block_rows(rows, ANCHORS, noisy)
        found = made.target_logits(made.logits(hidden, sigma))
    for b in range(2):
        for a in range(3):
            at = int(ANCHORS.index_BA[b, a])
            start = at - int(rows.positions_BL[b, at])
            context = DiffusionContext(made, 40)
            text = rows.tokens_BL[b, start : at + 1].tolist()
            context.extend(text[:2])
            context.extend(text[2:])
            alone = context.denoise(noisy.tokens_t[b, a])
            torch.testing.assert_close(found[b, a], alone, atol=2e-4, rtol=1e-4)
    assert found.shape[-1] == target.vocab_size


@pytest.mark.parametrize("kind", ["ddit", "masked_lm"])
def test_rows_see_their_own_document_and_no_future(target: Target, kind: str) -> None:
    made, rows = drafter(target, kind), batch(target)
    prefix = torch.full_like(rows.tokens_BL, 4)
    noisy = corrupt_suffix(
        rows, made.mask_id, made.schedule, prefix, torch.Generator().manual_seed(0)
    )

    def found(tokens_t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden, sigma = made.suffix_rows(rows, replace(noisy, tokens_t=tokens_t))
            return made.logits(hidden, sigma)

    base = found(noisy.tokens_t)
    other = noisy.tokens_t.clone()
    other[0, 12:] = 5  # the second document's noisy part
    moved = (found(other) - base).abs().amax(-1) > 1e-6
    assert not moved[0, :9].any() and moved[0, 13:17].any() and not moved[1].any()
    other = noisy.tokens_t.clone()
    other[0, 8] = 5  # a later noisy token of the first document: seen by its noisy ones alone
    moved = (found(other) - base).abs().amax(-1) > 1e-6
    # a first token is predicted by nothing of its own document: it is never noisy (a prefix of one at least)
    assert moved[0, 5] and not moved[0, :4].any() and not moved[0, 10:17].any()
