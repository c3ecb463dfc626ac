"""A block drafter's layers in one call draft what its modules draft, and write nothing into the target's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from align.data import shards as data
from align.kernels.linear import Matrix, rows_library
from align.models.block_session import BlockSession
from align.target.loading import load_target
from align.target.model import Target
from tests.builders import TRAINED_BLOCKS as VARIANTS
from tests.builders import block_network, trained_block

pytestmark = pytest.mark.skipif(rows_library() is None, reason="no C library, or no AVX2")


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_call_drafts_what_the_modules_draft(
    target: Target, samples: data.Samples, variant: dict[str, Any], round_rows: Callable[[bool], None]
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
    tokens = torch.tensor([[7, 8, 9, 10, 5], [7, 11, 12, 13, 5], [7, 9, 9, 9, 5]])[:, : drafter.config.rows]
    blocks = drafter.masked(tokens, torch.tensor([0, 2, 1]))
    got = [session.hidden(7), session.hidden_of_blocks(blocks)]
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (t for s in cache.slabs for t in (s.keys, s.values)), strict=True)
    )
    drafter.stack = None
    for mine, wanted in zip(got, [session.hidden(7), session.hidden_of_blocks(blocks)], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)
    drafter.stack = stack
    many = blocks.repeat(3, 1)  # 36 rows or more: more than one call takes
    torch.testing.assert_close(session.hidden_of_blocks(many)[:3], got[1], rtol=1e-4, atol=1e-4)


def test_a_tree_is_built_in_one_call_of_fp32_hidden_states_alone() -> None:
    """In bf16 a head without a Markov head is of a type that the library takes, and hidden states are not."""
    from align.models.block_stack import tree_head

    for dtype in ("float32", "bfloat16"):
        target = load_target("debug", dtype=dtype, device="cpu")
        drafter = block_network(target, "shared_kv").to(target.dtype)
        tree = tree_head(drafter, Matrix(drafter.head_weight_VdD.to(torch.bfloat16)), None)
        assert (tree is not None) == (dtype == "float32")
