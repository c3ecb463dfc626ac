"""One row of the target's outputs: features for the drafter, and what the losses need of p."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from align.losses.target_places import target_places
from specalign.common.batch import Batch
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import Features, TargetFeatures, target_features

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
RowKey = tuple[str, float]
"""A hash of a row's text and layout, and the temperature of p."""


def row_key(alone: Batch, temperature: float) -> RowKey:
    """The key of a row, given as a batch of one, by its content."""
    digest = hashlib.sha256()
    for tensor in (alone.tokens_BL, alone.positions_BL, alone.document_BL):
        digest.update(tensor.to("cpu", torch.int64).contiguous().numpy().tobytes())
    return digest.hexdigest()[:32], temperature


@dataclass
class RowOutputs:
    """One row: features, and log-sum-exp, argmax and log p(next) at its L places."""

    features: TargetFeatures
    log_z_L: Tensor
    best_L: Tensor
    log_p_next_L: Tensor

    def to_named(self) -> dict[str, Tensor]:
        """All its tensors by name."""
        f = self.features
        found = {"hidden": f.hidden_BLD, "log_z": self.log_z_L, "best": self.best_L}
        found["log_p"] = self.log_p_next_L
        found |= {f"key.{i}": k for i, k in enumerate(f.keys)}
        found |= {f"value.{i}": v for i, v in enumerate(f.values)}
        if f.taps_BLFD is not None:
            found["taps"] = f.taps_BLFD
        return found

    @classmethod
    def from_named(cls, tensors: dict[str, Tensor]) -> RowOutputs:
        """Raises KeyError if a tensor is missing."""
        layers = range(sum(name.startswith("key.") for name in tensors))
        keys = [tensors[f"key.{i}"] for i in layers]
        values = [tensors[f"value.{i}"] for i in layers]
        features = TargetFeatures(tensors["hidden"], keys, values, tensors.get("taps"))
        return cls(features, tensors["log_z"], tensors["best"], tensors["log_p"])

    def to(self, device: torch.device) -> RowOutputs:
        return RowOutputs.from_named({name: t.to(device) for name, t in self.to_named().items()})

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.to_named().values())


def compute_row(
    target: Target,
    alone: Batch,
    config: BlockConfig | None,
    temperature: float,
    dtype: torch.dtype,
    run: Features = target_features,
) -> RowOutputs:
    """The target over one row, rounded to `dtype`."""
    features = run(target, alone, config).map(lambda t: round_to(t, dtype))
    following = alone.tokens_BL.roll(-1, dims=1).flatten()
    # p of the rounded state, the one that its logits will be computed from
    hidden = features.hidden_BLD[0].to(target.dtype)
    places = target_places(hidden, following, target.head, temperature)
    return RowOutputs(features, places.log_z_P, places.best_P, places.log_p_next_P)


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in `dtype`, in fp32 if that overflows."""
    found = x.to(dtype, copy=True)
    return found if bool(found.isfinite().all()) else x.to(torch.float32, copy=True)
