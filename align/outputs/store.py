"""The target's outputs on disk, a safetensors file per row, named by the row's content and written
under another name first, so a kill leaves no half row, and rows serve every run that packs them.
`manifest.json` describes what they are outputs of."""

from __future__ import annotations

import errno
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from specalign.common.errors import UserError, system_number
from specalign.common.files import write_atomically, write_json
from specalign.common.schema import JsonObject, read_object
from specalign.common.text import say
from specalign.lm.model import Target
from specalign.models.block_config import BlockConfig

Row = dict[str, Tensor]
"""One row: hidden, key.N, value.N, taps for the drafter; log_z, best and log_p (of the next token)
at its L places."""
RowKey = tuple[str, float]
"""A hash of a row's text and layout, and the temperature of p."""
_OTHER = "give another trainer.features_path"


def count_bytes(row: Row) -> int:
    """The bytes of a row's numbers."""
    return sum(tensor.numel() * tensor.element_size() for tensor in row.values())


def describe_outputs(target: Target, config: BlockConfig | None, dtype: str) -> JsonObject:
    """What the rows are outputs of."""
    return {
        "target_sha256": target.hash,
        "target_dtype": target.dtype_name,
        "context": None if config is None else config.context,
        "layers": [] if config is None else list(config.target_layer_ids),
        "dtype": dtype,
    }


class OutputStore:
    """Rows on disk, up to a limit of bytes; further rows are not stored.

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
        if self.manifest.exists():
            found = read_object(self.manifest)
            for key, value in description.items():
                if found.get(key) != value:
                    differs = f"{key} is {found.get(key)!r}, here it would be {value!r}"
                    raise UserError(f"{self.manifest}: {differs}; {_OTHER}")
        elif sizes:
            raise UserError(f"{self.manifest} is missing: remove the outputs there, or {_OTHER}")

    def _path(self, key: RowKey) -> Path:
        digest, temperature = key
        return self.folder / f"row-{digest}-{temperature!r}.safetensors"

    def __contains__(self, key: RowKey) -> bool:
        return self._path(key).exists()

    def get(self, key: RowKey, device: torch.device) -> Row | None:
        """A row, or None. A damaged one is removed. Raises OSError: the system can't read it now."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return {name: tensor.to(device) for name, tensor in load_file(path).items()}
        except (SafetensorError, OSError) as error:
            if system_number(error) not in (None, errno.ENOENT):  # too many open files, for example
                raise
            say(f"warning: {path} is damaged ({error}) and counts as not stored", error=True)
            path.unlink(missing_ok=True)
            return None

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
