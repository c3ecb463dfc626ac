"""What a block drafter reads of the target over packed rows: one frozen forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specalign.common.batch import Batch
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig


@dataclass
class TargetFeatures:
    """What the drafter reads of the target over packed rows, without gradients.

    hidden_BLD: last hidden state; keys, values: per shared layer (B, Hkv, L, d), rotary positions
    applied; taps_BLFD.
    """

    hidden_BLD: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    taps_BLFD: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        taps = [] if self.taps_BLFD is None else [self.taps_BLFD]
        return [self.hidden_BLD, *self.keys, *self.values, *taps]

    def map(self, change: Callable[[Tensor], Tensor]) -> TargetFeatures:
        """The same with every tensor changed, in the order of `tensors`."""
        hidden, *others = [change(t) for t in self.tensors]
        count = len(self.keys)
        taps = None if self.taps_BLFD is None else others[-1]
        return TargetFeatures(hidden, others[:count], others[count : 2 * count], taps)


@torch.no_grad()
def target_features(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """One frozen forward of the target; without a config only the last hidden state."""
    shared = config is not None and config.context == "shared_kv"
    first = batch.document_BL[:1, :1]
    if target.anatomy.apart and (len(batch.document_BL) > 1 or (batch.document_BL != first).any()):
        return _each_document(target, batch, config)
    rows, length = batch.tokens_BL.shape
    ids = [] if config is None else config.target_layer_ids
    cache = target.new_cache(rows, length) if shared else None
    output = target.forward(
        batch.tokens_BL,
        cache=cache,
        positions_BL=batch.positions_BL,
        mask=batch.attention_mask(),
        taps=() if shared else ids,
        logits=False,
    )
    keys = [] if cache is None else [cache.k(i) for i in ids]
    values = [] if cache is None else [cache.v(i) for i in ids]
    return TargetFeatures(output.hidden_BLD, keys, values, output.taps_BLFD)


def _each_document(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """The features of each document on its own; padding gets zeros."""
    whole: TargetFeatures | None = None
    for row, places in batch.documents():
        alone = Batch(*(t[row : row + 1, places] for t in vars(batch).values()))
        found = target_features(target, alone, config)
        # the dimension of positions: 2 of keys and values, 1 of the others
        dims = [1, *[2] * len([*found.keys, *found.values]), 1]
        whole = whole or _zeros_like(found, dims, batch)
        for mine, its, dim in zip(whole.tensors, found.tensors, dims, strict=False):
            mine[row].movedim(dim - 1, 0)[places] = its[0].movedim(dim - 1, 0)
    assert whole is not None
    return whole


def _zeros_like(features: TargetFeatures, dims: list[int], batch: Batch) -> TargetFeatures:
    rows, length = batch.tokens_BL.shape
    sized = zip(features.tensors, dims, strict=False)
    shapes = iter([(rows, *t.shape[1:d], length, *t.shape[d + 1 :]) for t, d in sized])
    return features.map(lambda t: t.new_zeros(next(shapes)))
