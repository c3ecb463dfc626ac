"""This project's own layout of block drafters, read and written: config.json and
model.safetensors. Other engines' folders are read through their own layouts."""

from collections.abc import Callable
from pathlib import Path, PurePath

import torch
from torch import Tensor

from specalign.common.checksums import CHECKSUMS, check_checksums
from specalign.common.errors import UserError, in_one_line
from specalign.common.files import write_json
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, read_config
from specalign.common.text import say, short
from specalign.formats.dflash import read_dflash
from specalign.formats.dspark import read_dspark, take_heads
from specalign.formats.kinds import EXPORT_RECORD, layout_of, made_for
from specalign.formats.published import ConfigReader
from specalign.formats.speculators import read_speculators
from specalign.formats.tensors import check_vocabulary, read_vocabulary, rename_tensors
from specalign.formats.weights import INDEX, SAFE, check_shapes, read_folder, save_tensors
from specalign.lm.model import Target
from specalign.lm.slabs import LayerShape
from specalign.models.block import BlockDrafter
from specalign.models.block_config import BlockConfig

ARCHITECTURE = "TargetConditionedBlockDrafter"
FILES = (
    "config.json", "model*.safetensors", INDEX, EXPORT_RECORD, "README.md", CHECKSUMS,
    "specalign.json",
)  # fmt: skip
"""The files to download from a hub id."""
READERS: dict[str, Callable[[ConfigReader, Target], JsonObject]] = {
    "dflash": read_dflash,
    "dspark": read_dspark,
    "speculators": read_speculators,
    "transformers": ConfigReader.read_layers,
}
"""Other engines' layouts (`layout_of`) → what reads their config.json."""


def pack_drafter(drafter: BlockDrafter) -> tuple[JsonObject, dict[str, Tensor]]:
    """config.json and tensors of a drafter's own folder."""
    tensors = {name: p.detach() for name, p in drafter.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["draft_vocab"] = drafter.draft_vocab.to(torch.int32)
    if drafter.head is not None:
        tensors["head"] = drafter.head
    names = {"architectures": [ARCHITECTURE], "model_type": "block_drafter"}
    return {**names, **drafter.config.to_dict()}, tensors


def save_drafter(drafter: BlockDrafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the folder: weights in `dtype`, and config.json."""
    config, tensors = pack_drafter(drafter)
    stored = {n: t.to(dtype if t.is_floating_point() else t.dtype) for n, t in tensors.items()}
    save_tensors(folder / SAFE, stored)
    write_json(folder / "config.json", config)


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
        drafter = _import_drafter(values, layout, path, target)
    else:
        named = values.get("architectures")
        raise UserError(f"{path}/config.json: architectures={named!r:.60}: not a block drafter")
    # the last parts of the names: hashes differ by dtype, and a folder may have moved
    theirs, ours = (PurePath(n).name.casefold() for n in (drafter.config.target, target.spec))
    if theirs and theirs != ours:
        trained = f"{path} was trained for {short(drafter.config.target)}; if the weights of"
        what = "differ, fewer drafts will be accepted (outputs are unaffected)"
        say(f"note: drafter {trained} {short(target.spec)} {what}", error=True)
    return drafter


def _load_saved(values: JsonObject, path: Path, target: Target) -> BlockDrafter:
    """What `save_drafter` wrote."""
    config = BlockConfig.from_dict(values, f"{path}/config.json")
    where, tensors = f"{path}/{SAFE}", read_folder(path, f"drafter {path}")
    stored = {name: tensors.pop(name) for name in ["draft_vocab", "head"] if name in tensors}
    size = config.draft_vocab_size
    expected = {"draft_vocab": torch.Size([size])} if size else {}
    expected |= {"head": torch.Size([size, config.hidden_size])} if config.own_head else {}
    check_shapes(stored, expected, where)
    vocab, head = stored.get("draft_vocab"), stored.get("head")
    if vocab is not None:
        vocab = check_vocabulary(vocab, target.vocab_size, f"{where}: draft_vocab")
    return _build(config, tensors, vocab, None if head is None else head.float(), target, path)


def _import_drafter(values: JsonObject, layout: str, path: Path, target: Target) -> BlockDrafter:
    """Another engine's drafter; `layout`: from `layout_of`."""
    where, tensors = f"{path}/config.json", read_folder(path, f"drafter {path}")
    with in_one_line(where):
        found = READERS[layout](ConfigReader(values), target)
    vocab, head = read_vocabulary(tensors, target, path)
    options, heads = take_heads(tensors, found, path)
    sizes = {"draft_vocab_size": 0 if vocab is None else len(vocab), "own_head": head is not None}
    named = {"target": made_for(path, values) or target.spec, "target_sha256": ""}
    config = BlockConfig.from_dict({**found, **options, **sizes, **named}, where)
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
    _check_target(config, target, path)
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
        lacks = f"target {target.spec!r} lacks the rotary tables it needs"
        with in_one_line(f"drafter {path}: {lacks}"):
            drafter.rotary_tables(x, x[..., 0].long())[0].view(1, 1, config.head_dim)
    return drafter


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
        why = f"num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}"
        raise UserError(f"{path}/config.json: {why}")
