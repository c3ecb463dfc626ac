"""A format of block drafters: how it is made, written, read back and served."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from decode.exporting.folder import check_free, list_notes, note_target, write_card, write_folder
from decode.exporting.serving import ServedTarget, Snippet
from specalign.common.schema import read_config
from specalign.formats.block import import_drafter
from specalign.formats.gguf import check_vocabulary, write_gguf
from specalign.formats.kinds import layout_of
from specalign.formats.dflash import Exported
from specalign.formats.tensors import EMBEDDING, read_tensors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig


def read_export(folder: Path) -> Exported:
    """Config and tensors as they are stored. Raises UserError."""
    return Exported(read_config(folder), read_tensors(folder))


def restore_export(held: Exported, folder: Path, target: Target) -> BlockDrafter:
    """A drafter out of what a folder holds, as `specalign.formats` reads it. Raises UserError."""
    return import_drafter(held.config, dict(held.tensors), layout_of(held.config), folder, target)


@dataclass(frozen=True)
class Format:
    """A folder with config.json and model.safetensors, or with one GGUF file.

    make: a drafter's content; raises UserError naming the option to train with. serve: lines that
    serve a drafter of this config. library, tags: of the card.
    """

    name: str
    make: Callable[[BlockDrafter], Exported]
    serve: Callable[[BlockConfig, ServedTarget, str], list[Snippet]]
    library: str = "vllm"
    tags: tuple[str, ...] = ()
    read: Callable[[Path], Exported] = read_export
    restore: Callable[[Exported, Path, Target], BlockDrafter] = restore_export

    def check(self, made: Exported, vocabulary: Path | None) -> None:
        """Raises UserError if the target's GGUF file is needed, and missing or another model's."""
        if self.name == "gguf":
            check_vocabulary(made, vocabulary)

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

        def fill(part: Path) -> None:
            if vocabulary is not None and self.name == "gguf":
                write_gguf(part, made, out.name, dtype, vocabulary)
            else:
                write_files(part, made, dtype)

        record = {"format": self.name, "target": drafter.config.target}
        write_folder(out, record, card + list_notes(made.notes), fill)
        return made

    def snippets(self, drafter: BlockDrafter, target: ServedTarget, folder: str) -> list[Snippet]:
        """Lines that serve the folder."""
        return self.serve(drafter.config, target, folder)

    def card(self, source: Path, drafter: BlockDrafter, name: str, serve: list[Snippet]) -> str:
        """README.md of an export of the drafter in `source`, without notes."""
        c = drafter.config
        tags = ("speculative-decoding", "discrete-diffusion", "drafter", *self.tags)
        title = f"{name}: drafts {c.block_size} tokens a pass for {c.target} ({self.name})"
        return write_card(source, self.library, c.target, tags, title, serve, [])


def write_files(folder: Path, made: Exported, dtype: torch.dtype) -> None:
    """Weights in `dtype`; scaled embeddings in fp32, which have more digits than the target's."""
    made.config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = {}
    for key, tensor in made.tensors.items():
        stored = tensor.dtype
        if tensor.is_floating_point():
            stored = torch.float32 if key == EMBEDDING else dtype
        tensors[key] = tensor.detach().to("cpu", stored).contiguous().clone()
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    texts = {"config.json": json.dumps(made.config, indent=2) + "\n", **made.files}
    for path, text in texts.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
