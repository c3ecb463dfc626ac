"""A format: what it holds of a block drafter, how that is written, read back and served; and an
engine's own class for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from decode.exporting.folder import (
    EMBEDDING,
    Exported,
    check_free,
    list_notes,
    note_target,
    write_card,
    write_folder,
)
from decode.exporting.serving import ServedTarget, Snippet
from specalign.common.schema import read_config
from specalign.formats.block import import_drafter
from specalign.formats.layouts import layout_of
from specalign.formats.tensors import read_tensors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig


@dataclass(frozen=True)
class EngineDrafter:
    """An export in an engine's own class.

    network: with its `layers`. settings: with `target_layer_ids`, `mask_token_id` and `block_size`.
    embed: tokens (n,) → (n, D). fuse: tapped hidden states (n, F·D) → context (n, D). run: embedded
    block (1, R, D), taps (1, n, F·D) and positions (1, n + R) → hidden states after the last norm
    (1, R, D).
    """

    network: Any
    settings: Any
    embed: Callable[[Tensor], Tensor]
    fuse: Callable[[Tensor], Tensor]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """A folder with config.json and model.safetensors; a format that is written otherwise overrides
    methods.

    make: a drafter's content; raises UserError naming the option to train with. serve: lines that
    serve a drafter of this config. library, tags: of the card. open_engine: an export and the
    target in transformers → the engine's class; package: what it needs besides transformers.
    """

    name: str
    make: Callable[[BlockDrafter], Exported]
    serve: Callable[[BlockConfig, ServedTarget, str], list[Snippet]]
    library: str = "vllm"
    tags: tuple[str, ...] = ()
    open_engine: Callable[[Path, Any], EngineDrafter] | None = None
    package: str = ""

    def installed(self) -> bool:
        """Whether an engine of this process reads the format."""
        return self.open_engine is not None and (
            not self.package or find_spec(self.package) is not None
        )

    def check(self, made: Exported, vocabulary: Path | None) -> None:
        """Raises UserError if the target's GGUF file is needed, and missing or another model's."""

    def write(
        self,
        drafter: BlockDrafter,
        out: Path,
        dtype: torch.dtype,
        card: str,
        vocabulary: Path | None = None,
    ) -> Exported:
        """Write a drafter's folder; replaces an older export in this format.

        Args:
            vocabulary: the target's GGUF file, for the format `gguf`.

        Raises:
            UserError: the format can't hold the drafter, or the folder holds something else.
        """
        check_free(out, self.name)
        made = self.make(drafter)
        self.check(made, vocabulary)
        made.notes += note_target(drafter.config.target)
        record = {"format": self.name, "target": drafter.config.target}
        page = card + list_notes(made.notes)
        write_folder(
            out, record, page, lambda part: self.fill(part, made, out.name, dtype, vocabulary)
        )
        return made

    def fill(
        self, part: Path, made: Exported, name: str, dtype: torch.dtype, vocabulary: Path | None
    ) -> None:
        """Write the content into a folder that becomes the export `name`."""
        made.config["dtype"] = str(dtype).removeprefix("torch.")
        tensors = {}
        for key, tensor in made.tensors.items():
            stored = tensor.dtype
            if tensor.is_floating_point():
                stored = torch.float32 if key == EMBEDDING else dtype
            tensors[key] = tensor.detach().to("cpu", stored).contiguous().clone()
        save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
        for path, text in {
            "config.json": json.dumps(made.config, indent=2) + "\n",
            **made.files,
        }.items():
            (part / path).parent.mkdir(exist_ok=True)
            (part / path).write_text(text, encoding="utf-8")

    def read(self, folder: Path) -> Exported:
        """Config and tensors as they are stored. Raises UserError."""
        return Exported(read_config(folder), read_tensors(folder))

    def settings_in_file(self, made: Exported, held: Exported) -> dict[str, Any]:
        """Of an export's config what a file of this format holds."""
        return made.config

    def restore(self, held: Exported, folder: Path, target: Target) -> BlockDrafter:
        """A drafter out of what a folder holds, as `specalign.formats` reads it. Raises UserError."""
        return import_drafter(
            held.config, dict(held.tensors), layout_of(held.config), folder, target
        )

    def snippets(self, drafter: BlockDrafter, target: ServedTarget, folder: str) -> list[Snippet]:
        """Lines that serve the folder."""
        return self.serve(drafter.config, target, folder)

    def card(self, source: Path, drafter: BlockDrafter, name: str, serve: list[Snippet]) -> str:
        """README.md of an export of the drafter in `source`, without notes."""
        c = drafter.config
        tags = ("speculative-decoding", "discrete-diffusion", "drafter", *self.tags)
        title = f"{name}: drafts {c.block_size} tokens a pass for {c.target} ({self.name})"
        return write_card(source, self.library, c.target, tags, title, serve, [])
