"""An autoregressive drafter as an ordinary causal-LM folder: written, and read for an export
(`draft_model`), which engines open as a small language model."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specalign.common.checksums import CHECKSUMS, check_checksums
from specalign.common.errors import UserError
from specalign.common.files import write_text
from specalign.common.schema import read_config, read_object
from specalign.formats.kinds import EXPORT_RECORD, RECORD
from specalign.formats.published import Exported
from specalign.formats.weights import INDEX, read_folder, weight_files, write_weights
from specalign.models.causal import CausalDrafter


def save_causal(
    drafter: CausalDrafter,
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    card: str | None = None,
) -> None:
    """Write the folder: an ordinary causal LM in fp32 with the target's tokenizer, `drafter.json`,
    and README.md if a card is given. `weights`: replace its own parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model, target = drafter.model, drafter.target
    own = dict(drafter.named_parameters()) if weights is None else weights
    tensors = {name.removeprefix("model."): tensor for name, tensor in own.items()}
    known = {*tensors, *drafter.names}
    tensors |= {n: t for n, t in model.state_dict().items() if n not in known}  # a router's buffers
    embedding, head = drafter.names
    tensors[embedding] = drafter.embedding_VD
    config = copy.deepcopy(model.config)
    rows, head_rows = drafter.embedding_VD.float(), drafter.head_weight_VD.float()
    if not (config.tie_word_embeddings and torch.equal(rows, head_rows)):
        config.tie_word_embeddings = False  # loaded with the head that it was trained with
        tensors[head] = drafter.head_weight_VD
    write_weights({n: t.detach().to("cpu", torch.float32) for n, t in tensors.items()}, folder)
    record = {"kind": "autoregressive", **drafter.config.to_dict()}
    texts = {
        "generation_config.json": target.model.generation_config.to_json_string(),
        RECORD: json.dumps(record, indent=2) + "\n",
        **({} if card is None else {"README.md": card}),
        "config.json": config.to_json_string(),
    }
    target.tokenizer.save_pretrained(str(folder))
    for name, text in texts.items():
        write_text(folder / name, text)


@dataclass(frozen=True)
class CausalFolder:
    """A saved drafter, or any causal language model of the target's vocabulary. target: the name
    that others know the target by."""

    path: Path
    target: str


def make_draft_model(source: CausalFolder) -> Exported:
    """What an export of the folder holds. Raises UserError for no weights, or unreadable or
    quantised ones."""
    folder = source.path
    check_checksums(folder)
    config = read_config(folder)
    if "quantization_config" in config:
        raise UserError(f"drafter {folder}: is quantised; engines load that folder as it is")
    config = {k: v for k, v in config.items() if k not in ("torch_dtype", "_name_or_path")}
    skipped = {"README.md", "config.json", EXPORT_RECORD, CHECKSUMS, INDEX}
    skipped |= {path.name for path in weight_files(folder)}
    others = [path for path in folder.iterdir() if path.is_file() and path.name not in skipped]
    files = {path.name: path.read_bytes() for path in others}
    if RECORD in files:
        record = {**read_object(folder / RECORD), "target": source.target}
        files[RECORD] = (json.dumps(record, indent=2) + "\n").encode()
    return Exported(config, read_folder(folder, f"drafter {folder}"), files=files)
