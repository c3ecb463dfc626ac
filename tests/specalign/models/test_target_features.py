"""What is read of a target over packed rows is what each document alone gives."""

from __future__ import annotations

import pytest
import torch

from specalign.common.batch import Batch
from specalign.models.target_features import target_features
from tests.builders import block_network
from tests.target_models import tiny_target


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_documents_do_not_see_each_other(kind: str) -> None:
    """Where a mask keeps them apart, and where the target has states and each document runs alone; padding counts for nothing."""
    target = tiny_target(kind)
    config = block_network(target, "taps", whole=True).config
    tokens = torch.tensor([[3, 5, 7, 9, 4, 0], [8, 6, 5, 3, 2, 1]])
    documents = torch.tensor([[0, 0, 0, 1, 1, -1], [2, 2, 2, 2, 2, 2]])
    places = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    packed = target_features(target, Batch(tokens, places, documents, documents >= 0), config)
    for row, cut in ((0, slice(0, 3)), (0, slice(3, 5)), (1, slice(0, 6))):
        alone = Batch(*(t[row : row + 1, cut] for t in (tokens, places, documents, documents >= 0)))
        found = target_features(target, alone, config)
        for theirs, own in (
            (packed.hidden_BLD, found.hidden_BLD),
            (packed.taps_BLFD, found.taps_BLFD),
        ):
            assert theirs is not None and own is not None
            torch.testing.assert_close(theirs[row, cut], own[0], atol=1e-5, rtol=1e-4)
