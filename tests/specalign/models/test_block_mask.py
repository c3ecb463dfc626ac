"""What blocks see of packed rows: the sparse mask is the dense one at every pair, and attention over it the same."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from specalign.common.batch import Anchors, Batch
from specalign.lm.model import Target
from specalign.models import block
from specalign.models.block_mask import make_sight_rule, make_sparse_mask, see_context
from specalign.models.target_features import target_features
from specalign.rows.shards import Samples
from tests.builders import trained_block
from tests.target_models import some_text


def packed(length: int, anchors: int, seed: int) -> tuple[Tensor, Tensor]:
    """Documents of random lengths, padding behind them in the first row; anchors anywhere, ascending but for the last two."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, length, (2, 5), generator=generator)
    document_BL = (torch.arange(length) >= ends[..., None]).sum(1)
    document_BL[0, -length // 5 :] = -1
    noise = torch.rand(2, length, generator=generator)
    index_BA = noise.topk(anchors).indices.sort(1).values
    index_BA[:, -2:] = index_BA[:, :2]
    return document_BL, index_BA


@pytest.mark.parametrize(("length", "anchors", "size"), [(20, 6, 3), (300, 70, 4), (129, 40, 1)])
def test_sparse_is_dense_at_every_pair(length: int, anchors: int, size: int) -> None:
    document_BL, index_BA = packed(length, anchors, size)
    rule = make_sight_rule(document_BL, index_BA, size)
    queries = anchors * size
    found = create_mask(rule, 2, 1, queries, length + queries, "cpu")[:, 0]
    block_of = torch.arange(anchors).repeat_interleave(size)
    own = (block_of[:, None] == block_of).expand(2, -1, -1)
    context = see_context(document_BL, index_BA).repeat_interleave(size, dim=1)
    assert torch.equal(found, torch.cat((context, own), dim=2))
    for b, row in enumerate(index_BA.tolist()):  # by its definition
        for a, anchor in enumerate(row):
            seen = [i for i in range(anchor) if document_BL[b, i] == document_BL[b, anchor]]
            assert found[b, a * size, :length].nonzero()[:, 0].tolist() == seen


def test_tiles_that_nobody_sees_are_skipped() -> None:
    document_BL, index_BA = packed(1024, 128, 0)
    mask = make_sparse_mask(document_BL, index_BA.sort(1).values, 4)
    assert mask.sparsity() > 60


@pytest.mark.parametrize(
    "changes", [{}, {"context": "taps", "block_layout": "fill_in"}, {"convolution": True}]
)
def test_a_drafter_computes_the_same(
    target: Target, samples: Samples, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    drafter = trained_block(target, samples, **changes)
    length = 150
    document_BL, index_BA = packed(length, 40, 3)
    tokens = some_text(target, 2 * length).view(2, length)
    positions = torch.arange(length).expand(2, -1)
    batch = Batch(tokens, positions, document_BL, torch.ones_like(tokens, dtype=torch.bool))
    valid = torch.ones(2, 40, drafter.config.block_size, dtype=torch.bool)
    anchors = Anchors(index_BA, valid)
    features = target_features(target, batch, drafter.config)
    with torch.no_grad():
        dense = drafter(batch, features, anchors)
        monkeypatch.setattr(block, "can_attend_sparsely", lambda *heads: True)
        sparse = drafter(batch, features, anchors)
    assert not torch.equal(dense, sparse)  # another order of sums
    torch.testing.assert_close(sparse, dense, rtol=1e-4, atol=1e-5)
