"""`draft_model`: an autoregressive drafter is an ordinary language model; its export is its folder
in the requested dtype."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decode.exporting.compare import ExportVerdict
from decode.exporting.folder import check_free, list_notes, note_target, write_card, write_folder
from decode.exporting.formats import UnfitFormat
from decode.exporting.serving import ServedTarget, serve_draft_model
from decode.proposers.autoregressive import check_vocabulary
from specalign.common.checksums import CHECKSUMS, check_checksums
from specalign.common.errors import UserError
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import read_config, read_object
from specalign.formats.dflash import Exported
from specalign.formats.kinds import EXPORT_RECORD, RECORD
from specalign.formats.weights import read_folder, weight_files, write_weights
from specalign.lm.inspection.parts import embedding_names
from specalign.lm.loading import load_target
from specalign.lm.model import Target

FORMAT = "draft_model"
ROUNDED = "weights are rounded to {}; --dtype float32 keeps them"
_SKIPPED = ("README.md", EXPORT_RECORD, CHECKSUMS)
_HUB = ("*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja", "README.md")


def check_format(names: Iterable[str]) -> None:
    """Raises UnfitFormat for a format of block drafters."""
    for name in names:
        if name != FORMAT:
            why = "holds block drafters, and this one is an autoregressive language model"
            raise UnfitFormat(f"--format {name}: {why}", [FORMAT])


def make_draft_model(source: Path, dtype: str) -> Exported:
    """What an export of a language model's folder holds. Raises UserError for no weights, or
    unreadable or quantised ones."""
    config = read_config(source)
    if "quantization_config" in config:
        raise UserError(f"drafter {source}: is quantised; engines load that folder as it is")
    tensors = read_folder(source, f"drafter {source}")
    if has_own_head(source, tensors):
        config["tie_word_embeddings"] = False  # engines follow the key and would ignore the head
    stored = {name: _cast(tensor, dtype) for name, tensor in tensors.items()}
    exact = all(torch.equal(stored[name].to(t.dtype), t) for name, t in tensors.items())
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "_name_or_path")}
    return Exported({**config, "dtype": dtype}, stored, [] if exact else [ROUNDED.format(dtype)])


def has_own_head(folder: Path, tensors: dict[str, Tensor]) -> bool:
    """Whether a language model's tensors hold an output head that is not its embedding, whatever
    config.json says."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        embedding, head = embedding_names(model)
    except (OSError, ValueError, StopIteration):  # a class with custom code
        return False
    # some files lack a prefix
    rows = next((t for name, t in tensors.items() if embedding.endswith(name)), None)
    return head in tensors and (rows is None or not torch.equal(rows, tensors[head]))


def _cast(tensor: Tensor, dtype: str) -> Tensor:
    """A copy: tied weights share their storage, which safetensors refuses."""
    number = getattr(torch, dtype) if tensor.is_floating_point() else tensor.dtype
    return tensor.to(number, copy=True).contiguous()


def export_draft_model(
    drafter: str, target: str, out: Path, dtype: str, served: ServedTarget
) -> ExportVerdict:
    """Write the folder. Raises UserError for unreadable weights, or a folder of something else.

    Args:
        target: the name that others know the target by. served: the target in the printed lines.
    """
    source = model_folder(drafter, "drafter", _HUB)
    check_free(out, FORMAT)
    check_checksums(source)
    made = make_draft_model(source, dtype)
    notes = note_target(target) + made.notes
    title = f"{out.name}: a small language model that drafts for {target}"
    tags = ("speculative-decoding", "drafter")
    lines = serve_draft_model(served, out.name)
    card = write_card(source, "transformers", target, tags, title, lines) + list_notes(notes)

    def fill(part: Path) -> None:
        weights = weight_files(source)
        for path in source.iterdir():
            replaced = path in weights or path.name.endswith(".index.json")
            if path.is_file() and path.name not in _SKIPPED and not replaced:
                shutil.copyfile(path, part / path.name)
        if (part / RECORD).is_file():  # by the target's public name
            write_json(part / RECORD, {**read_object(part / RECORD), "target": target})
        write_json(part / "config.json", made.config)
        write_weights(made.tensors, part)

    write_folder(out, {"format": FORMAT, "target": target}, card, fill)
    snippets = serve_draft_model(served, str(out.absolute()))
    return ExportVerdict(FORMAT, out, notes=notes, serve=snippets)


def open_draft_model(drafter: str, target: Target) -> Target:
    """The drafter as a language model in fp32. Raises UserError if its vocabulary is not the
    target's."""
    trust = target.trust_remote_code
    model = load_target(drafter, "float32", str(target.device), trust_remote_code=trust)
    check_vocabulary(model, target)
    return model


def lacks_head(model: Target, target: Target) -> bool:
    """Whether a trained drafter has the target's embedding and not its head. Training freezes both,
    so that the head was lost in saving."""

    def is_same(one: Tensor, other: Tensor) -> bool:
        one, other = one.float(), other.float()
        rounding = 0.05 * other.square().mean().sqrt()  # half precision stays below
        return one.shape == other.shape and bool((one - other).abs().max() < rounding)

    same_head = is_same(model.head_weight_VD, target.head_weight_VD)
    return is_same(model.embedding_VD, target.embedding_VD) and not same_head


def compare_draft_model(verdict: ExportVerdict, drafter: str, target: Target) -> None:
    """Compare an export's config and tensors. Adds to the verdict."""
    folder = verdict.folder
    try:
        source = model_folder(drafter, "drafter", _HUB)
        model = open_draft_model(str(folder), target)
        if (source / RECORD).is_file() and lacks_head(model, target):
            raise UserError(
                f"{source} was trained with the head of {target.spec!r}, which is not its "
                "embedding, and saved without it: train it again"
            )
        config = read_config(folder)
        held = Exported(config, read_folder(folder, f"--export={folder}"))
        made = make_draft_model(source, str(config.get("dtype", "float32")))
        verdict.add_contents(held, made)
    except UserError as error:
        verdict.add("the files", False, str(error))
