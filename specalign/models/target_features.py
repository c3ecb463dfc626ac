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
        """All of them."""
        taps = [] if self.taps_BLFD is None else [self.taps_BLFD]
        return [self.hidden_BLD, *self.keys, *self.values, *taps]

    def map(self, change: Callable[[Tensor], Tensor]) -> TargetFeatures:
        """The same change applied to all of them."""
        keys, values = ([change(t) for t in part] for part in (self.keys, self.values))
        return TargetFeatures(
            change(self.hidden_BLD),
            keys,
            values,
            None if self.taps_BLFD is None else change(self.taps_BLFD),
        )


@torch.no_grad()
def target_features(target: Target, batch: Batch, config: BlockConfig | None) -> TargetFeatures:
    """One frozen forward of the target; without a config only the last hidden state."""
    shared = config is not None and config.context == "shared_kv"
    if target.anatomy.apart and not _one_document(batch):
        return each_document(target, batch, config, target_features)
    rows, length = batch.tokens_BL.shape
    cache = target.new_cache(rows, length) if shared else None
    output = target.forward(
        batch.tokens_BL,
        cache=cache,
        positions_BL=batch.positions_BL,
        mask=batch.attention_mask(),
        taps=() if shared or config is None else config.target_layer_ids,
        logits=False,
    )
    shared_ids = config.target_layer_ids if config is not None and shared else []
    keys = [cache.k(i) for i in shared_ids] if cache is not None else []
    values = [cache.v(i) for i in shared_ids] if cache is not None else []
    return TargetFeatures(output.hidden_BLD, keys, values, output.taps_BLFD)


def _one_document(batch: Batch) -> bool:
    return len(batch.document_BL) == 1 and bool(
        (batch.document_BL == batch.document_BL[0, 0]).all()
    )


Features = Callable[[Target, Batch, BlockConfig | None], TargetFeatures]
"""Runs the target: `target_features`, or its equivalent for a sharded or served target."""


def each_document(
    target: Target, batch: Batch, config: BlockConfig | None, features: Features
) -> TargetFeatures:
    """The features of each document on its own; padding gets zeros."""
    whole: TargetFeatures | None = None
    for row, document_L in enumerate(batch.document_BL):
        for places in document_places(document_L):
            alone = Batch(*(t[row : row + 1, places] for t in vars(batch).values()))
            found = features(target, alone, config)
            whole = whole or _zeros(found, batch)
            whole.hidden_BLD[row, places] = found.hidden_BLD[0]
            if whole.taps_BLFD is not None and found.taps_BLFD is not None:
                whole.taps_BLFD[row, places] = found.taps_BLFD[0]
            for mine, its in zip(
                (*whole.keys, *whole.values), (*found.keys, *found.values), strict=True
            ):
                mine[row][:, places] = its[0]
    assert whole is not None
    return whole


def document_places(document_L: Tensor) -> list[Tensor]:
    """The places of each document of a row, without padding."""
    return [(document_L == n).nonzero()[:, 0] for n in document_L.unique().tolist() if n >= 0]


def _zeros(one: TargetFeatures, batch: Batch) -> TargetFeatures:
    """Room for a batch's features, of the shapes of one document's."""
    rows, length = batch.tokens_BL.shape

    def room(t: Tensor, place: int = 1) -> Tensor:
        return t.new_zeros(rows, *(length if i == place else n for i, n in enumerate(t.shape) if i))

    taps = None if one.taps_BLFD is None else room(one.taps_BLFD)
    return TargetFeatures(
        room(one.hidden_BLD), [room(k, 2) for k in one.keys], [room(v, 2) for v in one.values], taps
    )
