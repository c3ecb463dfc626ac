"""Drafting one request: lightened weights, and several blocks in one pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specalign.kernels.linear import rows_library
from specalign.lm.model import Target
from specalign.models.block_session import BlockSession
from specalign.rows import shards as data
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import trained_block
from tests.builders import trained_block as build


@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_in_one_pass(target: Target, samples: data.Samples, variant: dict[str, Any]) -> None:
    """Nothing of one block reaches another: not by attention, or convolutions."""
    drafter = build(target, samples, **variant)
    cache = target.new_cache(1, 12)
    session = BlockSession(drafter, cache, 12)
    output = target.forward(torch.arange(5, 12)[None], cache=cache, taps=session.taps)
    session.observe(output.hidden_BLD, output.taps_BLFD, 7)
    blocks_NR = torch.tensor([[7, 9, 3, 3, 3], [7, 3, 3, 3, 3], [7, 9, 11, 12, 3]])
    blocks_NR = blocks_NR[:, : drafter.config.rows]
    together = session.draft_hidden_of_blocks(blocks_NR)
    for block_R, hidden_KD in zip(blocks_NR, together, strict=True):
        alone_KD = session.draft_hidden_of_blocks(block_R[None])[0]
        torch.testing.assert_close(alone_KD, hidden_KD, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_in_one_call_is_that_of_the_general_way(
    target: Target, samples: data.Samples, variant: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, round after round, after a rollback and in a cache that has been replaced; where one call can't do it, it is left
    alone."""
    drafter = build(target, samples, **variant)
    drafter.prepare_for_drafting()
    session = BlockSession(drafter, cache := target.new_cache(1, 60), 60)
    for start, length, kept, token in ((5, 10, 10, 7), (20, 6, 2, 9), (30, 3, 3, 11)):
        tokens = torch.arange(start, start + length)[None]
        output = target.forward(tokens, cache=cache, taps=session.taps)
        cache.keep(cache.length - length, list(range(kept)))
        session.observe(output.hidden_BLD, output.taps_BLFD, kept)
        found = session.draft_hidden(token)
        assert (session._repeated is not None) == (drafter.config.context == "shared_kv")
        with monkeypatch.context() as general:
            general.setattr(session, "_draft_in_one_call", lambda *_: None)
            assert torch.equal(found, session.draft_hidden(token))
        for block in cache._blocks:  # the memory moves
            old, block.parts = block.parts, [part.clone() for part in block.parts]
            block._point()
            for part in old:
                part.fill_(torch.nan)
        cache.views.clear()


@pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_drafts_what_the_modules_draft(
    target: Target,
    samples: data.Samples,
    variant: dict[str, Any],
    round_rows: Callable[[bool], None],
) -> None:
    """With rows as they are: of those rounded to eight bits a number between two steps may take either in the two ways."""
    round_rows(False)
    drafter = trained_block(target, samples, **variant)
    drafter.prepare_for_drafting()
    stack = drafter.stack
    assert stack is not None
    cache = target.new_cache(1, 300)
    session = BlockSession(drafter, cache, 300)
    tokens = torch.arange(5, 205)[None]
    output = target.forward(tokens, cache=cache, taps=session.taps)
    session.observe(output.hidden_BLD, output.taps_BLFD, 200)
    before = [t.clone() for slab in cache.slabs for t in (slab.keys, slab.values)]
    tokens = torch.tensor([[7, 8, 9, 10, 5], [7, 11, 12, 13, 5], [7, 9, 9, 9, 5]])
    blocks = drafter.mask_blocks(tokens[:, : drafter.config.rows], torch.tensor([0, 2, 1]))
    got = session.draft_hidden(7), session.draft_hidden_of_blocks(blocks)
    after = [t for slab in cache.slabs for t in (slab.keys, slab.values)]
    assert all(map(torch.equal, before, after))
    drafter.stack = None
    wanted = session.draft_hidden(7), session.draft_hidden_of_blocks(blocks)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    drafter.stack = stack
    many = session.draft_hidden_of_blocks(blocks.repeat(3, 1))  # more rows than one call takes
    torch.testing.assert_close(many[:3], got[1], rtol=1e-4, atol=1e-4)
