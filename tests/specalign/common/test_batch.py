"""Rows, anchors and steps: who sees whom, and which place predicts what."""

from __future__ import annotations

import torch

from specalign.common.batch import Anchors, Batch, Step


def rows() -> Batch:
    document = torch.tensor([[0, 0, 1, 1, -1], [0, 0, 0, 0, 0]])
    tokens = torch.arange(10).view(2, 5)
    return Batch(tokens, torch.zeros_like(tokens), document, document >= 0)


def test_a_position_sees_its_document_up_to_itself_and_padding_itself_alone() -> None:
    see = rows().attention_mask()[:, 0]
    assert see[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]
    assert torch.equal(see[1], torch.ones(5, 5, dtype=torch.bool).tril())
    assert torch.equal(rows().row(1).tokens_BL, rows().tokens_BL[1:])


def test_the_token_after_a_place_is_the_one_that_the_place_predicts() -> None:
    batch = rows()
    anchors = Anchors(torch.tensor([[0, 3], [1, 2]]), torch.ones(2, 2, 2, dtype=torch.bool))
    assert anchors.block_size == 2
    assert anchors.places_BAK(5).tolist() == [[[0, 1], [3, 4]], [[1, 2], [2, 3]]]
    assert anchors.blocks_BAK(batch.tokens_BL).tolist() == [[[1, 2], [4, 4]], [[7, 8], [8, 9]]]
    moved = Step(batch, anchors, scale=0.5, keys=(3,)).to(torch.device("cpu"))
    assert (moved.scale, moved.keys) == (0.5, (3,)) and torch.equal(
        moved.anchors.index_BA, anchors.index_BA
    )
