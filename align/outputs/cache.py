"""The target's outputs over the training text, computed every time or kept in memory or on disk.

The target is frozen, so later epochs can skip its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from align.config.trainer import TrainerConfig
from align.losses.target_places import TargetPlaces, target_places
from align.outputs.row import DTYPES, RowKey, RowOutputs, compute_row, row_key
from align.outputs.store import OutputStore, describe_outputs
from specalign.common.batch import Batch, Step
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import Features, TargetFeatures, target_features


@dataclass
class TargetOutputs:
    """The target over a micro-batch: features for the drafter, and p at `used_P`, the flat places
    (b·L + i, ascending) that some block is trained on."""

    features: TargetFeatures
    places: TargetPlaces
    used_P: Tensor


def used_places(step: Step) -> Tensor:
    """Flat places, ascending, whose p some valid drafted row imitates; one place if there is
    none."""
    rows, length = step.batch.tokens_BL.shape
    offset = torch.arange(rows, device=step.batch.tokens_BL.device)[:, None, None] * length
    place_BAK, valid = step.anchors.places_BAK(length) + offset, step.anchors.valid_BAK
    return (place_BAK[valid] if bool(valid.any()) else place_BAK.flatten()[:1]).unique()


def compute_target_outputs(
    target: Target,
    step: Step,
    config: BlockConfig | None,
    temperature: float,
    run: Features = target_features,
) -> TargetOutputs:
    """One forward of the target; its head runs only over the used places."""
    features, used = run(target, step.batch, config), used_places(step)
    following = step.batch.tokens_BL.roll(-1, dims=1).flatten()
    hidden = features.hidden_BLD.flatten(0, 1)[used]
    places = target_places(hidden, following[used], target.head, temperature, finish=target.finish)
    return TargetOutputs(features, places, used)


class TargetOutputCache:
    """The target's outputs by row, kept within limits of memory and disk.

    A row is always computed alone and rounded (fp32 where fp16 overflows), stored or not, so that a
    resumed run stays bit-identical.

    Args:
        config: of the drafter; None = it reads only the last hidden state.
        options: `keep_features_gb` of memory, `features_gb` of disk, their `features_dtype`.
        folder: where rows are stored. writers: processes that store.

    Raises:
        UserError: the folder holds outputs of something else.
    """

    def __init__(
        self,
        target: Target,
        config: BlockConfig | None,
        options: TrainerConfig,
        folder: Path | None = None,
        writers: int = 1,
    ) -> None:
        self.target, self.config = target, config
        self.dtype = DTYPES[options.features_dtype]
        self.room = int(options.keep_features_gb * 1e9)
        self.store = None
        if options.features_gb and folder is not None:
            about = describe_outputs(target, config, options.features_dtype)
            self.store = OutputStore(folder, about, options.features_gb, writers)
        self._rows: dict[RowKey, RowOutputs] = {}
        self.run: Features = target_features
        self.missing: Callable[[bool], bool] = bool
        """Whether to compute a row, given whether this process lacks it; with a sharded target,
        whether any process does."""

    def outputs(self, step: Step, temperature: float) -> TargetOutputs:
        """As `compute_target_outputs`, from rows of `step.keys`."""
        rows = [self.row(step.batch.row(i), temperature) for i in range(len(step.keys))]
        parts = [row.features for row in rows]
        dtype = self.target.dtype
        taps = [p.taps_BLFD for p in parts if p.taps_BLFD is not None]
        features = TargetFeatures(
            _join([p.hidden_BLD for p in parts], dtype),
            [_join(layer, dtype) for layer in zip(*(p.keys for p in parts), strict=True)],
            [_join(layer, dtype) for layer in zip(*(p.values for p in parts), strict=True)],
            _join(taps, dtype) if taps else None,
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

    def row(self, alone: Batch, temperature: float) -> RowOutputs:
        """One row, given as a batch of one: from memory, from disk, or computed and then kept."""
        key = row_key(alone, temperature)
        row = self._rows.get(key)
        kept = row is not None
        if row is None and self.store is not None:
            stored = self.store.get(key)
            row = None if stored is None else stored.to(self.target.device)
        if self.missing(row is None):
            made = compute_row(self.target, alone, self.config, temperature, self.dtype, self.run)
            if row is None and self.store is not None:
                self.store.put(key, made)
            row = row or made
        assert row is not None
        if not kept and row.bytes <= self.room:
            self.room -= row.bytes
            self._rows[key] = row
        return row


def _join(rows: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
    """Rows as one batch. Each is converted first: autocast to bf16 refuses to join fp16."""
    return torch.cat([row.to(dtype) for row in rows])
