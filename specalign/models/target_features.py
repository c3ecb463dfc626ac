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
        keys, values = ([change(t) for t in part] for part in (self.keys, self.values))
        taps = None if self.taps_BLFD is None else change(self.taps_BLFD)
        return TargetFeatures(change(self.hidden_BLD), keys, values, taps)


@torch.no_grad()
def target_features(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """One frozen forward of the target; without a config only the last hidden state."""
    shared = config is not None and config.context == "shared_kv"
    first = batch.document_BL[:1, :1]
    if target.anatomy.apart and (len(batch.document_BL) > 1 or (batch.document_BL != first).any()):
        return each_document(target, batch, config, target_features)
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


Features = Callable[[Target, Batch, BlockConfig | None], TargetFeatures]
"""Runs the target: `target_features`, or its equivalent for a sharded or served target."""


def each_document(
    target: Target, batch: Batch, config: BlockConfig | None, features: Features
) -> TargetFeatures:
    """The features of each document on its own; padding gets zeros."""
    whole: TargetFeatures | None = None
    rows, length = batch.tokens_BL.shape

    def room(t: Tensor, dim: int) -> Tensor:
        shape = [rows, *t.shape[1:]]
        shape[dim] = length
        return t.new_zeros(shape)

    for row, document_L in enumerate(batch.document_BL):
        for places in document_places(document_L):
            alone = Batch(*(t[row : row + 1, places] for t in vars(batch).values()))
            found = features(target, alone, config)
            if whole is None:
                keys, values = ([room(t, 2) for t in part] for part in (found.keys, found.values))
                taps = None if found.taps_BLFD is None else room(found.taps_BLFD, 1)
                whole = TargetFeatures(room(found.hidden_BLD, 1), keys, values, taps)
            whole.hidden_BLD[row, places] = found.hidden_BLD[0]
            if whole.taps_BLFD is not None and found.taps_BLFD is not None:
                whole.taps_BLFD[row, places] = found.taps_BLFD[0]
            theirs = (*found.keys, *found.values)
            for mine, its in zip((*whole.keys, *whole.values), theirs, strict=True):
                mine[row][:, places] = its[0]
    assert whole is not None
    return whole


def document_places(document_L: Tensor) -> list[Tensor]:
    """The places of each document of a row, without padding."""
    return [(document_L == n).nonzero()[:, 0] for n in document_L.unique().tolist() if n >= 0]
