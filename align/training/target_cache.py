"""What the target computes over the training text, every time or once and then cached in memory from epoch to epoch.

The target is frozen, so its forward over a row gives the same every time. A small machine that trains for several
epochs spends about half its time on it: cached in fp16, a later epoch costs the drafter's work alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from align.losses.objective import TargetPlaces, target_places
from align.models.block import TargetFeatures, target_features
from align.models.block_config import BlockConfig
from align.target.model import Target
from align.training.datamodule import Step


@dataclass
class TargetOutputs:
    """The target over a micro-batch: features for the drafter, and p at `used_P`, the flat places (b·L + i) that some
    anchor's block asks for, ascending."""

    features: TargetFeatures
    places: TargetPlaces
    used_P: Tensor


def used_places(step: Step) -> Tensor:
    """Flat places, ascending, whose p some valid drafted row imitates; one place where there is none."""
    rows, length = step.batch.tokens_BL.shape
    offset = torch.arange(rows, device=step.batch.tokens_BL.device)[:, None, None] * length
    place_BAK, valid = step.anchors.places_BAK(length) + offset, step.anchors.valid_BAK
    return (place_BAK[valid] if bool(valid.any()) else place_BAK.flatten()[:1]).unique()


def compute_target_outputs(
    target: Target, step: Step, config: BlockConfig | None, temperature: float
) -> TargetOutputs:
    """One forward of the target; its head runs over the used places, not over prompts and padding."""
    features, used = target_features(target, step.batch, config), used_places(step)
    following = step.batch.tokens_BL.roll(-1, dims=1).flatten()
    hidden = features.hidden_BLD.flatten(0, 1)[used]
    places = target_places(hidden, following[used], target.head, temperature, finish=target.finish)
    return TargetOutputs(features, places, used)


@dataclass
class _Row:
    """One row: its features, and log-sum-exp, argmax and log p(next) at all its L places."""

    features: TargetFeatures
    log_z_L: Tensor
    best_L: Tensor
    log_p_next_L: Tensor

    def tensors(self) -> list[Tensor]:
        f = self.features
        taps = [] if f.taps_BLFD is None else [f.taps_BLFD]
        return [f.hidden_BLD, *f.keys, *f.values, *taps, self.log_z_L, self.best_L, self.log_p_next_L]

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors())


class TargetOutputCache:
    """The target's outputs by row, cached up to a limit of memory; rows beyond it are computed every time.

    A row is always computed alone and rounded to fp16 (fp32 stays where fp16 overflows), cached or not: what training
    sees does not depend on what is in memory, so a resumed run stays bit-identical.

    Args:
        gigabytes: memory to use, 1e9 bytes each.
    """

    def __init__(self, target: Target, config: BlockConfig | None, gigabytes: float) -> None:
        self.target, self.config = target, config
        self.room = int(gigabytes * 1e9)
        self._rows: dict[tuple[int, float], _Row] = {}

    def outputs(self, step: Step, temperature: float) -> TargetOutputs:
        """As `compute_target_outputs`, from rows of `step.keys`."""
        rows = [self._row(step, i, temperature) for i in range(len(step.keys))]
        parts = [row.features for row in rows]
        dtype = self.target.dtype
        features = TargetFeatures(
            _joined([p.hidden_BLD for p in parts], dtype),
            [_joined(layer, dtype) for layer in zip(*(p.keys for p in parts), strict=True)],
            [_joined(layer, dtype) for layer in zip(*(p.values for p in parts), strict=True)],
            None
            if parts[0].taps_BLFD is None
            else _joined([p.taps_BLFD for p in parts if p.taps_BLFD is not None], dtype),
        )
        used = used_places(step)
        places = TargetPlaces(
            features.hidden_BLD.flatten(0, 1)[used],
            torch.cat([row.log_z_L for row in rows])[used],
            torch.cat([row.best_L for row in rows])[used],
            step.batch.tokens_BL.roll(-1, dims=1).flatten()[used],
            torch.cat([row.log_p_next_L for row in rows])[used],
            temperature,
            self.target.finish,
        )
        return TargetOutputs(features, places, used)

    def _row(self, step: Step, index: int, temperature: float) -> _Row:
        key = (step.keys[index], temperature)
        if key in self._rows:
            return self._rows[key]
        alone = step.batch.row(index)
        features = target_features(self.target, alone, self.config)
        rounded = TargetFeatures(
            _half(features.hidden_BLD),
            [_half(k) for k in features.keys],
            [_half(v) for v in features.values],
            None if features.taps_BLFD is None else _half(features.taps_BLFD),
        )
        following = alone.tokens_BL.roll(-1, dims=1).flatten()
        # p of the rounded state, the one that its logits will be computed from
        hidden = rounded.hidden_BLD[0].to(self.target.dtype)
        places = target_places(hidden, following, self.target.head, temperature)
        row = _Row(rounded, places.log_z_P, places.best_P, places.log_p_next_P)
        if row.bytes <= self.room:
            self.room -= row.bytes
            self._rows[key] = row
        return row


def _half(x: Tensor) -> Tensor:
    """An fp16 copy; fp32 where fp16 overflows."""
    half = x.to(torch.float16, copy=True)
    return half if bool(half.isfinite().all()) else x.to(torch.float32, copy=True)


def _joined(rows: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Rows as one batch. Each is converted first: autocast to bf16 refuses to join what is fp16."""
    return torch.cat([row.to(dtype) for row in rows])
