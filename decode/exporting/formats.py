"""The formats of block drafters: what each holds of a drafter, written and read back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from decode.exporting.folder import check_free, list_notes, note_target, write_card, write_folder
from decode.exporting.serving import Snippet
from decode.portable import checks, generate
from decode.portable import drafter as network
from specalign.common.errors import UserError
from specalign.common.schema import read_config
from specalign.formats.block import import_drafter, load_drafter, pack_drafter
from specalign.formats.dflash import (
    Exported,
    check_last_layer,
    make_assistant,
    make_dflash,
    make_speculators,
)
from specalign.formats.dspark import make_dspark
from specalign.formats.gguf import check_vocabulary, make_gguf, read_gguf, restore_gguf, write_gguf
from specalign.formats.kinds import layout_of
from specalign.formats.tensors import EMBEDDING, read_tensors
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

REQUIREMENTS = "torch>=2.5\ntransformers>=5.0\nsafetensors\n"
_TAGS = ("speculative-decoding", "discrete-diffusion", "drafter")


class UnfitFormat(UserError):
    """A format can't hold a drafter. fitting: the formats that can."""

    def __init__(self, reason: str, fitting: Sequence[str]) -> None:
        hint = "no engine's format holds this drafter"
        if fitting:
            hint = f"this drafter fits --format {' or '.join(fitting)}"
        super().__init__(f"{reason}; {hint}")
        self.fitting = tuple(fitting)


def make_custom_generate(drafter: BlockDrafter) -> Exported:
    """A folder that transformers' `generate` runs: the drafter's own files, with the modules of
    `decode.portable` as source. Raises UserError for a target whose cache can't be rolled back, or
    a tapped last layer."""
    if drafter.target.anatomy.recurrent:
        why = f"{drafter.target.spec!r} keeps a state that transformers' cache can't take back"
        raise UserError(f"--format custom_generate: {why}; use decode.custom_generate here")
    check_last_layer(drafter, "custom_generate")
    files = {"custom_generate/requirements.txt": REQUIREMENTS}
    for name, module in {"generate": generate, "checks": checks, "drafter": network}.items():
        source = inspect.getsource(module).replace("from decode.portable.", "from .")
        files[f"custom_generate/{name}.py"] = source
    return Exported(*pack_drafter(drafter), files=files)


MAKERS: dict[str, Callable[[BlockDrafter], Exported]] = {
    "dflash": make_dflash,
    "speculators": make_speculators,
    "dspark": make_dspark,
    "transformers": make_assistant,
    "gguf": make_gguf,
    "custom_generate": make_custom_generate,
}
"""What a format holds of a drafter. They raise UserError naming the option to train with."""


def make_export(form: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a block drafter. Raises UnfitFormat if it can't hold it."""
    try:
        if form not in MAKERS:
            why = "this is a block drafter, train with drafter.kind=autoregressive"
            raise UserError(f"--format {form}: an autoregressive language model; {why}")
        return MAKERS[form](drafter)
    except UserError as error:
        fitting = []
        for name, make in MAKERS.items():
            with suppress(UserError):
                make(drafter)
                fitting.append(name)
        raise UnfitFormat(str(error), fitting) from None


def write_export(
    form: str,
    drafter: BlockDrafter,
    out: Path,
    dtype: torch.dtype,
    card: str,
    vocabulary: Path | None = None,
) -> list[str]:
    """Write a drafter's folder and return the notes; replaces an older export in this format.
    Raises UserError if the format can't hold the drafter, or the folder holds something else.

    Args:
        card: README.md without notes. vocabulary: the target's GGUF file, for `gguf`.
    """
    check_free(out, form)
    made = MAKERS[form](drafter)
    if form == "gguf":
        check_vocabulary(made, vocabulary)
    notes = made.notes + note_target(drafter.config.target)

    def fill(part: Path) -> None:
        if vocabulary is not None and form == "gguf":
            write_gguf(part, made, out.name, dtype, vocabulary)
        else:
            _write_files(part, made, dtype)

    record = {"format": form, "target": drafter.config.target}
    write_folder(out, record, card + list_notes(notes), fill)
    return notes


def _write_files(folder: Path, made: Exported, dtype: torch.dtype) -> None:
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


def write_block_card(
    form: str, source: Path, drafter: BlockDrafter, name: str, serve: list[Snippet]
) -> str:
    """README.md of an export of the drafter in `source`, without notes."""
    libraries = {"speculators": "speculators", "gguf": "llama.cpp"}
    libraries |= dict.fromkeys(("transformers", "custom_generate"), "transformers")
    c = drafter.config
    tags = (*_TAGS, form) if form in ("gguf", "custom_generate") else _TAGS
    title = f"{name}: drafts {c.block_size} tokens a pass for {c.target} ({form})"
    return write_card(source, libraries.get(form, "vllm"), c.target, tags, title, serve)


def read_export(form: str, folder: Path) -> Exported:
    """Config and tensors as they are stored. Raises UserError."""
    if form == "gguf":
        return read_gguf(folder)
    return Exported(read_config(folder), read_tensors(folder))


def restore_export(form: str, held: Exported, folder: Path, target: Target) -> BlockDrafter:
    """A drafter out of what a folder holds, as `specalign.formats` reads it. Raises UserError."""
    if form == "gguf":
        return restore_gguf(held, folder, target)
    layout = layout_of(held.config)
    if form == "custom_generate" or not layout:  # this project's own layout
        return load_drafter(folder, target)
    return import_drafter(held.config, dict(held.tensors), layout, folder, target)
