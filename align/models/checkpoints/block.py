"""Saving and loading block drafters: a folder in hub layout, config.json + model.safetensors + README.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from align.common.checksums import CHECKSUMS, check_checksums
from align.common.errors import UserError
from align.common.files import write_atomically, write_json, write_text
from align.common.hub import model_folder
from align.common.schema import read_config
from align.common.text import say, short
from align.importing.heads import take_heads
from align.importing.layouts import RECORD, layout_of, made_for
from align.importing.rotary import scaled_entry
from align.importing.settings import read_settings
from align.importing.tensors import (
    INDEX,
    MASK,
    check_embedding,
    read_tensors,
    read_vocabulary,
    rename_tensors,
)
from align.models.block import BlockDrafter
from align.models.block_config import BlockConfig
from align.models.checkpoints.weights import checked
from align.target.model import Target
from align.target.names import check_sizes
from align.target.slabs import LayerShape

ARCHITECTURE = "TargetConditionedBlockDrafter"
FILES = ("config.json", "model*.safetensors", INDEX, MASK, RECORD, "README.md", CHECKSUMS, "specalign.json")
"""What is fetched of a hub id."""


def save_drafter(
    drafter: BlockDrafter, folder: Path, card: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write the folder: weights in `dtype` (default bf16), config.json, and README.md when a card is given."""
    if drafter.updates:
        raise ValueError("merge_low_rank(drafter) before it is saved")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().to(dtype).contiguous().cpu() for name, p in drafter.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["draft_vocab"] = drafter.draft_vocab.to(torch.int32).cpu()
    if drafter.head is not None:
        tensors["head"] = drafter.head.to(dtype).contiguous().cpu()
    config = {"architectures": [ARCHITECTURE], "model_type": "block_drafter", **drafter.config.to_dict()}
    write_atomically(
        folder / "model.safetensors", lambda part: save_file(tensors, str(part), metadata={"format": "pt"})
    )
    write_json(folder / "config.json", config)
    if card is not None:
        write_text(folder / "README.md", card)


def load_drafter(folder: str | Path, target: Target) -> BlockDrafter:
    """A saved drafter, or another engine's (`align.importing`), in fp32, tied to `target`.

    `folder` is a local folder or a hub id.

    Raises:
        UserError: not a drafter folder, torn weights, weights that are no numbers, or a drafter made for a target of
            another shape. (One made for other weights of that shape drafts worse, never wrongly.)
    """
    path = model_folder(str(folder), "drafter", FILES)
    check_checksums(path)
    values = read_config(path)
    check_sizes(path, f"drafter {path}")
    if (layout := layout_of(values)) and values.get("architectures") != [ARCHITECTURE]:
        drafter = import_drafter(values, read_tensors(path), layout, path, target)
    else:
        drafter = _build(*_saved(path, values, target), target, path)
    _note_other_target(drafter.config.target, target, path)
    return drafter


def import_drafter(
    values: dict[str, Any],
    tensors: dict[str, Tensor],
    layout: str,
    path: Path,
    target: Target,
    frequency_factors: Tensor | None = None,
) -> BlockDrafter:
    """Another engine's drafter from its config and tensors.

    Args:
        layout: as `layout_of` gives it. path: for messages, and for the target's name. frequency_factors: how much more slowly
            than by `rope_theta` each pair of a head turns, (d / 2).

    Raises:
        UserError: what the network here does not compute, or a drafter for a target of another shape.
    """
    where = f"{path}/config.json"
    if not layout:
        raise UserError(f"{where}: is of no layout that is read here")
    found = read_settings(values, layout, where, target)
    if frequency_factors is not None:
        found["rotary"] = [scaled_entry(found["rope_theta"], frequency_factors)]
    found |= {"target": made_for(path, values), "target_sha256": ""}
    _check_sizes(_config({**found, "confidence_head": False, "confidence_input": ""}, where), target, path)
    return _build(
        *_imported(path, values, found, checked(tensors, f"{path}/model.safetensors"), layout, target),
        target,
        path,
    )


def _build(config: BlockConfig, parts: _Parts, target: Target, path: Path) -> BlockDrafter:
    _check_room(config, parts.tensors, path)
    drafter = BlockDrafter(config, target, parts.vocab, parts.head)
    _load_exactly(drafter, parts.tensors, path)
    _check_tables(drafter.to(target.device), path)
    return drafter


def _note_other_target(made_for: str, target: Target, path: Path) -> None:
    """By the last part of the names: the same weights have another hash in another type, and a folder may have moved."""
    spec, unnamed = (
        target.spec,
        type(target.model).__name__,
    )  # as decode.custom_generate calls a model without a name
    theirs, ours = (name.rstrip("/").rpartition("/")[2].casefold() for name in (made_for, spec))
    if theirs and theirs != ours and spec != unnamed:
        say(
            f"note: drafter {path} was made for {short(made_for)}; where {short(spec)} has other weights, its drafts are worse (outputs "
            "stay exact)",
            error=True,
        )


@dataclass
class _Parts:
    """Tensors of the network by name, the draft vocabulary, and the head's rows where they are not the target's."""

    tensors: dict[str, Tensor]
    vocab: Tensor | None
    head: Tensor | None


def _saved(path: Path, values: dict[str, Any], target: Target) -> tuple[BlockConfig, _Parts]:
    """What `save_drafter` wrote."""
    if values.get("architectures") != [ARCHITECTURE]:
        raise UserError(
            f"{path}/config.json: architectures is {values.get('architectures')}, not a block drafter ({ARCHITECTURE})"
        )
    config = BlockConfig.from_dict(values, f"{path}/config.json")
    _check_sizes(config, target, path)
    tensors = checked(read_tensors(path), f"{path}/model.safetensors")
    vocab, head = tensors.pop("draft_vocab", None), tensors.pop("head", None)
    if vocab is not None and not _ascending(vocab, target.vocab_size):
        raise UserError(
            f"{path}/model.safetensors: draft_vocab must be ascending token ids within 0..{target.vocab_size - 1}"
        )
    if (0 if vocab is None else len(vocab)) != config.draft_vocab_size:
        raise UserError(
            f"{path}: draft_vocab does not have the {config.draft_vocab_size} entries that config.json says"
        )
    if config.own_head != (head is not None):
        raise UserError(
            f"{path}: config.json says own_head={str(config.own_head).lower()}, model.safetensors differs"
        )
    if head is not None and head.shape != (config.draft_vocab_size, config.hidden_size):
        raise UserError(f"{path}/model.safetensors: head has shape {tuple(head.shape)}")
    return config, _Parts(
        tensors, None if vocab is None else vocab.long(), None if head is None else head.float()
    )


def _imported(
    path: Path,
    values: dict[str, Any],
    found: dict[str, Any],
    tensors: dict[str, Tensor],
    layout: str,
    target: Target,
) -> tuple[BlockConfig, _Parts]:
    """Another engine's tensors, after the settings `found`."""
    where = f"{path}/config.json"
    check_embedding(tensors, layout, target, path)
    vocab, head = read_vocabulary(tensors, target, path)
    said, count = values.get("draft_vocab_size"), found["vocab_size"] if vocab is None else len(vocab)
    if (vocab is not None or layout == "speculators") and said not in (None, count):
        held = "no d2t" if vocab is None else f"a d2t for {count} draft tokens"
        raise UserError(f"{where}: draft_vocab_size={short(said, 40)}, and model.safetensors holds {held}")
    heads = take_heads(tensors, found, found["hidden_size"], path)
    sizes = {"draft_vocab_size": 0 if vocab is None else len(vocab), "own_head": head is not None}
    config = _config({**found, **heads.settings, **sizes, "target": found["target"] or target.spec}, where)
    return config, _Parts(rename_tensors(tensors, path) | heads.tensors, vocab, head)


def _config(values: dict[str, Any], where: str) -> BlockConfig:
    try:
        return BlockConfig.from_dict(values, where)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{where}: ')}") from None


def _check_sizes(config: BlockConfig, target: Target, path: Path) -> None:
    """Raises UserError where it was made for a target of another shape."""
    sizes = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_target_layers": target.num_layers,
    }
    if config.context == "shared_kv" and config.num_target_layers == target.num_layers:
        for i in config.target_layer_ids:  # it attends to the target's own keys
            shape = target.anatomy.shapes[i] or LayerShape(0, 0, 0)
            sizes |= {"num_key_value_heads": shape.heads, "head_dim": shape.key}
            if shape.value != (config.value_dim or config.head_dim):
                sizes["value_dim"] = shape.value
    for name, value in sizes.items():
        if getattr(config, name) != value:
            made = f"; it was made for {config.target!r}" if config.target else ""
            raise UserError(
                f"drafter {path}: {name} is {getattr(config, name)}, target {target.spec!r} has {value}{made}"
            )
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{path}/config.json: num_attention_heads={config.num_attention_heads} is no multiple of "
            f"num_key_value_heads={config.num_key_value_heads}"
        )


def _check_room(config: BlockConfig, tensors: dict[str, Tensor], path: Path) -> None:
    """Raises UserError for a size that the tensors are too small for, before memory is taken for it: each one is some tensor's."""
    there = max(1 << 16, sum(tensor.numel() for tensor in tensors.values()))
    for name in (
        "intermediate_size",
        "markov_rank",
        "markov_width",
        "num_attention_heads",
        "head_dim",
        "value_dim",
    ):
        width = config.hidden_size if name == "intermediate_size" else 1
        if getattr(config, name) * width > there:
            raise UserError(
                f"{path}/config.json: {name}={getattr(config, name)}: the weights are far too small for that"
            )
    if config.num_attention_heads * config.head_dim > there:
        raise UserError(
            f"{path}/config.json: num_attention_heads={config.num_attention_heads} of head_dim={config.head_dim}: the weights are far "
            "too small for that"
        )


@torch.no_grad()
def _check_tables(drafter: BlockDrafter, path: Path) -> None:
    """Raises UserError where it wants the target's own rotary tables, and the target has none of its kind."""
    config, target = drafter.config, drafter.target
    if config.rotaries:
        return
    positions = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    try:
        cos, sin = drafter.rotary_tables(
            torch.zeros(1, 1, config.hidden_size, device=target.device), positions
        )
        fits = cos.shape == sin.shape == (1, 1, config.head_dim)
    except Exception:  # modules of this name are called in many ways
        fits = False
    if not fits:
        raise UserError(
            f"drafter {path} uses its target's rotary tables, and target {target.spec!r} has none that fit; it was made for "
            f"{config.target!r}"
        )


def _ascending(vocab: Tensor, vocab_size: int) -> bool:
    """Whether these are distinct ids in order: token verification counts on a column for each."""
    if vocab.dim() != 1 or vocab.is_floating_point() or len(vocab) == 0:
        return False
    vocab = vocab.long()
    return bool((vocab.diff() > 0).all()) and int(vocab[0]) >= 0 and int(vocab[-1]) < vocab_size


def _load_exactly(drafter: BlockDrafter, tensors: dict[str, Tensor], path: Path) -> None:
    mine = dict(drafter.named_parameters())
    missing, extra = sorted(mine.keys() - tensors.keys()), sorted(tensors.keys() - mine.keys())
    if missing or extra:
        what = f"misses {missing[0]!r}" if missing else f"has an unknown tensor {extra[0]!r}"
        raise UserError(f"{path}/model.safetensors {what}")
    with torch.no_grad():
        for name, parameter in mine.items():
            if tensors[name].shape != parameter.shape:
                raise UserError(
                    f"{path}/model.safetensors: {name} has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name].float())
