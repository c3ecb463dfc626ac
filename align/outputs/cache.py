"""The target's outputs over the training text, computed every time or kept in memory or on disk,
so that later epochs skip the target's forward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from align.config.trainer import TrainerConfig
from align.losses.divergence_gradients import TargetPlaces, target_places
from specalign.common.batch import Batch, Step
from specalign.common.errors import UserError
from specalign.common.files import write_atomically, write_json
from specalign.common.schema import JsonObject, read_object
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig
from specalign.models.target_features import TargetFeatures, target_features

Row = dict[str, Tensor]
"""One row: hidden, key.N, value.N, taps for the drafter; log_z, best and log_p (of the next token)
at its L places."""
RowKey = tuple[str, float]  # a hash of a row's text and layout, and the temperature of p
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class TargetOutputs:
    """The target over a micro-batch: features for the drafter, and p at `step.used.flat_P`."""

    features: TargetFeatures
    places: TargetPlaces


def compute_target_outputs(
    target: Target, step: Step, config: BlockConfig | None, temperature: float
) -> TargetOutputs:
    """One forward of the target; its head runs only over the used places."""
    features, used_P = target_features(target, step.batch, config), step.used.flat_P
    following = step.batch.tokens_BL.roll(-1, dims=1).flatten()
    hidden = features.hidden_BLD.flatten(0, 1)[used_P]
    places = target_places(
        hidden, following[used_P], target.head, temperature, finish=target.finish
    )
    return TargetOutputs(features, places)


def compute_row(
    target: Target, alone: Batch, config: BlockConfig | None, temperature: float, dtype: torch.dtype
) -> Row:
    """The target over one row, rounded to `dtype`."""
    features = _round(target_features(target, alone, config), dtype)
    following = alone.tokens_BL.roll(-1, dims=1).flatten()
    # p of the rounded state, the one that its logits will be computed from
    hidden = features.hidden_BLD[0].to(target.dtype)
    places = target_places(hidden, following, target.head, temperature)
    row = {"hidden": features.hidden_BLD, "log_z": places.log_z_P, "best": places.best_P}
    row["log_p"] = places.log_p_next_P
    row |= {f"key.{i}": key for i, key in enumerate(features.keys)}
    row |= {f"value.{i}": value for i, value in enumerate(features.values)}
    if features.taps_BLFD is not None:
        row["taps"] = features.taps_BLFD
    return row


def _round(features: TargetFeatures, dtype: torch.dtype) -> TargetFeatures:
    """Copies in `dtype`, in fp32 of those that overflow."""
    rounded = features.map(lambda t: t.to(dtype, copy=True))
    fits = torch.stack([t.isfinite().all() for t in rounded.tensors]).tolist()  # one transfer
    if all(fits):
        return rounded
    kept = iter(zip(fits, rounded.tensors, strict=True))

    def choose(whole: Tensor) -> Tensor:
        is_finite, found = next(kept)
        return found if is_finite else whole.to(torch.float32, copy=True)

    return features.map(choose)


def count_bytes(row: Row) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())


class OutputStore:
    """Rows on disk, up to a limit of bytes; further rows are not stored. A safetensors file per
    row, named by its content and written atomically, so that rows serve every run that packs them.
    `manifest.json` describes what they are outputs of.

    Args:
        folder: created with the first row; UserError if it holds outputs of something else.
        gigabytes: limit, 1e9 bytes each. writers: processes that share the remaining room evenly.
    """

    def __init__(
        self, folder: Path, description: JsonObject, gigabytes: float, writers: int = 1
    ) -> None:
        self.folder, self.description, self.full = folder, description, False
        self.manifest = folder / "manifest.json"
        sizes = [path.stat().st_size for path in folder.glob("row-*.safetensors")]
        self.count, self.bytes = len(sizes), sum(sizes)
        self.limit = self.bytes + (int(gigabytes * 1e9) - self.bytes) // writers
        found = read_object(self.manifest) if sizes or self.manifest.exists() else description
        for key, value in description.items():
            if found.get(key) != value:
                raise UserError(
                    f"{self.manifest}: {key} is {found.get(key)!r}, this run needs {value!r}; give "
                    "another trainer.features_path"
                )

    def _path(self, key: RowKey) -> Path:
        digest, temperature = key
        return self.folder / f"row-{digest}-{temperature!r}.safetensors"

    def get(self, key: RowKey, device: torch.device) -> Row | None:
        """A row, or None. Raises UserError for a damaged one."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return {name: tensor.to(device) for name, tensor in load_file(path).items()}
        except SafetensorError as error:
            raise UserError(f"{path}: not readable ({error}); delete it if damaged") from None

    def put(self, key: RowKey, row: Row) -> None:
        """Store a row if there is room, else set `full`."""
        tensors = {name: tensor.cpu().contiguous() for name, tensor in row.items()}
        size = count_bytes(row) + 128 * (len(tensors) + 1)  # with the file's header, at most
        if self.full or self.bytes + size > self.limit:
            self.full = True
            return
        if not self.manifest.exists():
            write_json(self.manifest, self.description)
        write_atomically(self._path(key), lambda part: save_file(tensors, str(part)))
        self.count += 1
        self.bytes += size


class TargetOutputCache:
    """The target's outputs by row, kept within limits of memory and disk. A row is always computed
    alone and rounded, stored or not, so that a resumed run stays bit-identical.

    Args:
        config: of the drafter; None = it reads only the last hidden state.
        folder: where rows are stored; UserError if it holds outputs of something else.
        writers: processes that store.
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
            description = {
                "target_sha256": target.hash,
                "target_dtype": target.dtype_name,
                "context": None if config is None else config.context,
                "layers": [] if config is None else list(config.target_layer_ids),
                "dtype": options.features_dtype,
            }
            self.store = OutputStore(folder, description, options.features_gb, writers)
        self._rows: dict[RowKey, Row] = {}
        self.missing: Callable[[bool], bool] = bool
        """Whether to compute a row, given whether this process lacks it; with a sharded target,
        whether any process does."""

    def outputs(self, step: Step, temperature: float) -> TargetOutputs:
        """Like `compute_target_outputs`, but from the cached rows of `step.keys`."""
        digests = enumerate(step.digests or step.batch.digests())
        rows = [self.row(step.batch.row(i), temperature, digest) for i, digest in digests]
        # converted first: autocast to bf16 refuses to join fp16
        joined = {
            name: torch.cat([self._restore(name, row[name]) for row in rows]) for name in rows[0]
        }
        layers = range(sum(name.startswith("key.") for name in joined))
        features = TargetFeatures(
            joined["hidden"],
            [joined[f"key.{i}"] for i in layers],
            [joined[f"value.{i}"] for i in layers],
            joined.get("taps"),
        )
        used = step.used.flat_P
        places = TargetPlaces(
            features.hidden_BLD.flatten(0, 1)[used],
            joined["log_z"][used],
            joined["best"][used],
            step.batch.tokens_BL.roll(-1, dims=1).flatten()[used],
            joined["log_p"][used],
            temperature,
            self.target.finish,
        )
        return TargetOutputs(features, places)

    def _restore(self, name: str, tensor: Tensor) -> Tensor:
        return tensor if name in ("log_z", "best", "log_p") else tensor.to(self.target.dtype)

    def row(self, alone: Batch, temperature: float, digest: str = "") -> Row:
        """One row, given as a batch of one: from memory, from disk, or computed and then kept."""
        key = (digest or alone.digests()[0], temperature)
        row = self._rows.get(key)
        is_kept = row is not None
        if row is None and self.store is not None:
            row = self.store.get(key, self.target.device)
        if self.missing(row is None):
            made = compute_row(self.target, alone, self.config, temperature, self.dtype)
            if row is None and self.store is not None:
                self.store.put(key, made)
            row = row or made
        assert row is not None
        if not is_kept and count_bytes(row) <= self.room:
            self.room -= count_bytes(row)
            self._rows[key] = row
        return row
