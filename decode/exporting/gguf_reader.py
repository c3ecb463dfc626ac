"""What llama.cpp computes with an exported GGUF file, after its definition of the architecture `dflash`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from align.common.errors import UserError, in_one_line
from decode.exporting.gguf_file import ARCHITECTURE, FILE, LAYER, SIZES, TOP
from decode.exporting.reader import FilesReader


class GGUFFileReader(FilesReader):
    """The file's words under the names of DFlash's and DSpark's config.json, its tensors under theirs."""

    name = "the file by llama.cpp's definition"

    def __init__(self, folder: Path, model: Any) -> None:
        from gguf import GGUFReader

        self.folder, self.model = folder, model
        with in_one_line(f"{folder / FILE}: not readable"):
            file = GGUFReader(folder / FILE)
            self._words = {key: field.contents() for key, field in file.fields.items() if "tokens" not in key}
            self._stored = {_name(t.name): _tensor(t) for t in file.tensors}
        self.config = self.inner = self._config()
        self.tensors = {
            k: t.float().to(model.device) if t.is_floating_point() else t for k, t in self._stored.items()
        }
        if (d2t := self.tensors.get("d2t")) is not None:  # token ids here, offsets in DFlash's folders
            self.tensors["d2t"] = d2t - torch.arange(len(d2t))

    def said(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """Those that the file has a word for; it holds numbers in fp32."""
        return wanted | {k: _snapped(v, wanted[k]) for k, v in self.config.items() if k in wanted}

    def stored(self) -> dict[str, Tensor]:
        return self._stored

    def _word(self, key: str) -> Any:
        name = f"{ARCHITECTURE}.{key}"
        if name not in self._words:
            raise UserError(f"{self.folder / FILE}: misses {name}")
        return self._words[name]

    def _config(self) -> dict[str, Any]:
        sizes = {ours: self._word(key) for key, ours in SIZES.items()}
        found: dict[str, Any] = {
            **sizes,
            "rms_norm_eps": self._word("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._word("rope.freq_base"),
            "is_causal": self._word("attention.causal"),
            "target_layer_ids": [i - 1 for i in self._word("target_layers")],
            "mask_token_id": self._words.get("tokenizer.ggml.mask_token_id"),
            "hidden_act": self._words.get(f"{ARCHITECTURE}.hidden_activation", "silu"),
        }
        if "markov_head.markov_w1.weight" in self._stored:
            found["markov_rank"] = self._stored["markov_head.markov_w1.weight"].shape[1]
            found["markov_head_type"] = "vanilla"
        # without a Markov head the anchor's row drafts nothing; with one it does unless the file says otherwise
        found["sample_from_anchor"] = "markov_rank" in found and bool(
            self._words.get(f"{ARCHITECTURE}.sample_from_anchor", True)
        )
        if (scale := self._words.get(f"{ARCHITECTURE}.embedding_scale")) is not None:
            found["input_embedding_scale"] = scale
        return found

    def _tables(self, count: int) -> tuple[Tensor, Tensor]:
        width, base = int(self.config["head_dim"]), float(self.config["rope_theta"])
        turns = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
        if (factors := self._stored.get("rope_freqs.weight")) is not None:
            turns = turns / factors
        angles = torch.arange(count, dtype=torch.float32)[:, None] * torch.cat((turns, turns))
        return angles.cos().to(self.model.device), angles.sin().to(self.model.device)


def _snapped(value: Any, wanted: Any) -> Any:
    both = isinstance(value, float) and isinstance(wanted, int | float)
    return wanted if both and math.isclose(value, wanted, rel_tol=1e-6) else value


_TOP = {theirs: ours for ours, theirs in TOP.items()}
_LAYER = {theirs: ours for ours, theirs in LAYER.items()}


def _name(name: str) -> str:
    if not name.startswith("blk."):
        return _TOP.get(name, name)
    _, layer, part, kind = name.split(".")
    return f"layers.{layer}.{_LAYER.get(part, part)}.{kind}"


def _tensor(tensor: Any) -> Tensor:
    """As torch has it, in the type that it is stored in."""
    from gguf import GGMLQuantizationType

    shape = [int(n) for n in reversed(tensor.shape)]
    if tensor.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(np.array(tensor.data).view(np.int16).reshape(shape)).view(torch.bfloat16)
    return torch.from_numpy(np.array(tensor.data).reshape(shape))
