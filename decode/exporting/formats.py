"""The formats of exports: what each holds of a block drafter, written and read back."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from decode.exporting.folder import check_free, write_folder
from decode.portable import drafter as network
from decode.portable import generate
from specalign.common.errors import UserError
from specalign.common.schema import read_config
from specalign.formats import gguf
from specalign.formats.block import import_drafter, load_drafter, pack_drafter
from specalign.formats.dflash import make_dflash
from specalign.formats.dspark import make_dspark
from specalign.formats.kinds import layout_of
from specalign.formats.published import Exported, check_last_layer
from specalign.formats.speculators import make_speculators
from specalign.formats.tensors import EMBEDDING
from specalign.formats.transformers import make_assistant
from specalign.formats.weights import read_folder, write_weights
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

REQUIREMENTS = "torch>=2.5\ntransformers>=5.0\nsafetensors\n"


def make_custom_generate(drafter: BlockDrafter) -> Exported:
    """A folder that transformers' `generate` runs: the drafter's own files, with the modules of
    `decode.portable` as source. Raises UserError for a target whose cache can't be rolled back, or
    a tapped last layer."""
    if drafter.target.anatomy.recurrent:
        why = f"{drafter.target.spec!r} keeps a state that transformers' cache can't take back"
        raise UserError(f"--format custom_generate: {why}")
    check_last_layer(drafter, "custom_generate")
    files = {"custom_generate/requirements.txt": REQUIREMENTS}
    for name, module in {"generate": generate, "drafter": network}.items():
        source = inspect.getsource(module).replace("from decode.portable.", "from .")
        files[f"custom_generate/{name}.py"] = source
    return Exported(*pack_drafter(drafter), files)


MAKERS: dict[str, Callable[[BlockDrafter], Exported]] = {
    "dflash": make_dflash,
    "speculators": make_speculators,
    "dspark": make_dspark,
    "transformers": make_assistant,
    "gguf": gguf.make_gguf,
    "custom_generate": make_custom_generate,
}
"""What a format holds of a drafter. They raise UserError naming the option to train with."""


def make_export(form: str, drafter: BlockDrafter) -> Exported:
    """What a format holds of a drafter. Raises UserError if it can't hold it, with those that
    can."""
    try:
        return MAKERS[form](drafter)
    except UserError as error:
        fitting = []
        for name, make in MAKERS.items():
            with suppress(UserError):
                make(drafter)
                fitting.append(name)
        hint = f"this drafter fits --format {' or '.join(fitting)}" if fitting else "no format does"
        raise UserError(f"{error}; {hint}") from None


def write_export(
    form: str,
    drafter: BlockDrafter,
    out: Path,
    dtype: torch.dtype,
    card: str = "",
    vocabulary: Path | None = None,
) -> None:
    """Write a drafter's folder; replaces an older export in this format. Raises UserError if the
    format can't hold the drafter, or the folder holds something else.

    Args:
        card: README.md. vocabulary: the target's GGUF file, for `gguf`.
    """
    check_free(out, form)
    made = MAKERS[form](drafter)
    if form == "gguf":
        gguf.check_vocabulary(made, vocabulary)

    def fill(part: Path) -> None:
        (part / "README.md").write_text(card, encoding="utf-8")
        if form == "gguf" and vocabulary is not None:
            gguf.write_gguf(part, made, out.name, dtype, vocabulary)
        else:
            _write_files(part, made, dtype)

    write_folder(out, {"format": form, "target": drafter.config.target}, fill)


def _write_files(folder: Path, made: Exported, dtype: torch.dtype) -> None:
    """Weights in `dtype`; scaled embeddings in fp32, which have more digits than the target's."""
    made.config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = {}
    for key, tensor in made.tensors.items():
        kept = torch.float32 if key == EMBEDDING else dtype
        kept = kept if tensor.is_floating_point() else tensor.dtype
        tensors[key] = tensor.detach().to("cpu", kept, copy=True)  # some share their storage
    write_weights(tensors, folder)
    config = json.dumps(made.config, indent=2) + "\n"
    for path, text in {"config.json": config, **made.files}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def read_export(form: str, folder: Path) -> Exported:
    """Config and tensors as they are stored. Raises UserError."""
    if form == "gguf":
        return gguf.read_gguf(folder)
    return Exported(read_config(folder), read_folder(folder, f"--export={folder}"))


def restore_export(form: str, held: Exported, folder: Path, target: Target) -> BlockDrafter:
    """A drafter out of what a folder holds, as `specalign.formats` reads it. Raises UserError."""
    if form == "gguf":
        return gguf.restore_gguf(held, folder, target)
    if layout := layout_of(held.config):
        return import_drafter(held.config, dict(held.tensors), layout, folder, target)
    return load_drafter(folder, target)
