"""Saving and loading block drafters: a folder in hub layout, config.json + model.safetensors +
README.md. Other engines' folders are loaded too."""

from __future__ import annotations

from pathlib import Path, PurePath

import torch
from torch import Tensor

from specalign.common.checksums import CHECKSUMS, check_checksums
from specalign.common.errors import UserError, in_one_line
from specalign.common.files import write_json, write_text
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, read_config
from specalign.common.text import say, short
from specalign.formats.dspark import take_heads
from specalign.formats.kinds import EXPORT_RECORD, layout_of, made_for
from specalign.formats.rotary import scaled_entry
from specalign.formats.settings import read_settings
from specalign.formats.tensors import (
    MASK,
    check_vocabulary,
    read_tensors,
    read_vocabulary,
    rename_tensors,
)
from specalign.formats.weights import INDEX, SAFE, check_shapes, save_tensors
from specalign.lm.cache import LayerShape
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

ARCHITECTURE = "TargetConditionedBlockDrafter"
FILES = (
    "config.json", "model*.safetensors", INDEX, MASK, EXPORT_RECORD, "README.md", CHECKSUMS,
    "specalign.json",
)  # fmt: skip
"""The files to download from a hub id."""


def pack_drafter(drafter: BlockDrafter) -> tuple[JsonObject, dict[str, Tensor]]:
    """config.json and tensors of a drafter's own folder."""
    tensors = {name: p.detach() for name, p in drafter.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["draft_vocab"] = drafter.draft_vocab.to(torch.int32)
    if drafter.head is not None:
        tensors["head"] = drafter.head
    names = {"architectures": [ARCHITECTURE], "model_type": "block_drafter"}
    return {**names, **drafter.config.to_dict()}, tensors


def save_drafter(
    drafter: BlockDrafter,
    folder: Path,
    card: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write the folder: weights in `dtype`, config.json, and README.md if a card is given."""
    config, tensors = pack_drafter(drafter)
    stored = {n: t.to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    save_tensors(folder / SAFE, stored)
    write_json(folder / "config.json", config)
    if card is not None:
        write_text(folder / "README.md", card)


def load_drafter(folder: str | Path, target: Target) -> BlockDrafter:
    """A saved drafter, or another engine's (`specalign.formats.kinds`), from a folder or hub id, in
    fp32. Raises UserError for another folder, broken weights, or a target of another shape. (One
    for other weights of that shape drafts worse, never wrongly.)"""
    path = model_folder(str(folder), "drafter", FILES)
    check_checksums(path)
    values = read_config(path)
    if values.get("architectures") == [ARCHITECTURE]:
        drafter = _load_saved(values, path, target)
    elif layout := layout_of(values):
        drafter = import_drafter(values, read_tensors(path), layout, path, target)
    else:
        named = values.get("architectures")
        raise UserError(f"{path}/config.json: architectures={named!r:.60}: not a block drafter")
    _note_other_target(drafter.config.target, target, path)
    return drafter


def _load_saved(values: JsonObject, path: Path, target: Target) -> BlockDrafter:
    """What `save_drafter` wrote."""
    config = BlockConfig.from_dict(values, f"{path}/config.json")
    _check_target(config, target, path)
    where, tensors = f"{path}/{SAFE}", read_tensors(path)
    vocab, head = tensors.pop("draft_vocab", None), tensors.pop("head", None)
    if vocab is not None:
        vocab = check_vocabulary(vocab, target.vocab_size, f"{where}: draft_vocab")
    if (0 if vocab is None else len(vocab)) != config.draft_vocab_size:
        stated = f"the {config.draft_vocab_size} entries that config.json says"
        raise UserError(f"{where}: draft_vocab does not have {stated}")
    shape = (config.draft_vocab_size, config.hidden_size) if config.own_head else None
    if shape != (None if head is None else head.shape):
        raise UserError(f"{where}: head is not that of own_head={config.own_head} in config.json")
    return _build(config, tensors, vocab, None if head is None else head.float(), target, path)


def import_drafter(
    values: JsonObject,
    tensors: dict[str, Tensor],
    layout: str,
    path: Path,
    target: Target,
    frequency_factors: Tensor | None = None,
) -> BlockDrafter:
    """Another engine's drafter from its config and tensors. Raises UserError for what the network
    here does not compute, or a drafter for a target of another shape.

    Args:
        layout: from `layout_of`. path: for messages, and for the target's name. frequency_factors:
            by how much each pair of a head turns more slowly than by `rope_theta`, (d / 2).
    """
    where = f"{path}/config.json"
    found = read_settings(values, layout, where, target)
    if frequency_factors is not None:
        found["rotary"] = [scaled_entry(found["rope_theta"], frequency_factors)]
    found |= {"target": made_for(path, values), "target_sha256": ""}
    headless = {**found, "confidence_head": False, "confidence_input": ""}
    _check_target(BlockConfig.from_dict(headless, where), target, path)
    vocab, head = read_vocabulary(tensors, target, path)
    count = target.vocab_size if vocab is None else len(vocab)
    stated = values.get("draft_vocab_size")
    if (vocab is not None or layout == "speculators") and stated not in (None, count):
        size = f"draft_vocab_size={short(stated, 40)}"
        raise UserError(f"{where}: {size}, and {SAFE} holds {count} draft tokens")
    options, heads = take_heads(tensors, found, found["hidden_size"], path)
    sizes = {"draft_vocab_size": 0 if vocab is None else len(vocab), "own_head": head is not None}
    settings = {**found, **options, **sizes, "target": found["target"] or target.spec}
    config = BlockConfig.from_dict(settings, where)
    return _build(config, rename_tensors(tensors, path) | heads, vocab, head, target, path)


@torch.no_grad()
def _build(
    config: BlockConfig,
    tensors: dict[str, Tensor],
    vocab: Tensor | None,
    head: Tensor | None,
    target: Target,
    path: Path,
) -> BlockDrafter:
    with in_one_line(f"{path}/config.json"), torch.device("meta"):  # no memory before shapes fit
        parameters = BlockDrafter(config, target, vocab, head).named_parameters()
        expected = {name: parameter.shape for name, parameter in parameters}
    check_shapes(tensors, expected, f"{path}/{SAFE}")
    drafter = BlockDrafter(config, target, vocab, head)
    for name, parameter in drafter.named_parameters():
        parameter.copy_(tensors[name].float())
    drafter.to(target.device)
    if not config.rotaries:
        x = torch.zeros(1, 1, config.hidden_size, device=target.device)
        with in_one_line(
            f"drafter {path}: target {target.spec!r} lacks the rotary tables it needs"
        ):
            cos, _ = drafter.rotary_tables(x, x[..., 0].long())
            cos.view(1, 1, config.head_dim)
    return drafter


def _note_other_target(made_for: str, target: Target, path: Path) -> None:
    """Compares the last parts of the names: hashes differ by dtype, and a folder may have moved."""
    unnamed = type(target.model).__name__  # as decode.custom_generate names a model without a name
    theirs, ours = (PurePath(name).name.casefold() for name in (made_for, target.spec))
    if theirs and theirs != ours and target.spec != unnamed:
        made = f"note: drafter {path} was made for {short(made_for)}; if {short(target.spec)}"
        what = "has other weights, fewer drafts are accepted (outputs stay exact)"
        say(f"{made} {what}", error=True)


def _check_target(config: BlockConfig, target: Target, path: Path) -> None:
    """Raises UserError for a drafter made for a target of another shape."""
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
    made = f"; it was made for {config.target!r}" if config.target else ""
    for name, value in sizes.items():
        own = getattr(config, name)
        if own != value:
            has = f"target {target.spec!r} has {value}{made}"
            raise UserError(f"drafter {path}: {name} is {own}, {has}")
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    if heads % groups:
        sizes_of = f"num_attention_heads={heads} is no multiple of num_key_value_heads={groups}"
        raise UserError(f"{path}/config.json: {sizes_of}")
