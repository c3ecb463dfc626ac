"""Making, saving and loading masked-diffusion language models (align/models/masked_lm.py).

`load_masked_lm` reads the published families (`align.models.families`); `adapt` makes one out of an autoregressive
target (DiffuLLaMA, arXiv 2410.17891).
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

import torch
import transformers
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from align.common.errors import UserError, in_one_line, nearest
from align.common.files import load_tensors, write_atomically
from align.common.hub import model_folder
from align.common.schema import convert, read_json, read_object
from align.models.families import BASES, Family, family_of
from align.models.masked_lm import MaskedLM, is_lora
from align.models.opened import check_opened, refusing
from align.target.interface import register
from align.target.loading import quiet_loading, read_config
from align.target.model import Target
from align.target.names import check_sizes
from align.target.text_model import TextModel, embedding_names, text_model, tied

ADAPTED = Family(
    # what `adapt` makes; base, attention, cache and mask are filled in from its config.json
    name="adapted",
    hub_ids=(),
    model_type="adapted_masked_lm",
    architectures=("AdaptedMaskedLM",),
    base="",
    mask_token_id=0,
    shift=1,
)
ATTENTIONS = ("full", "prefix_causal")
"""What an adapted drafter may see by default."""
_SAFE = "model.safetensors"
# of a config.json, what says how to load it and nothing of the network
_OWN = {
    "architectures",
    "auto_map",
    "model_type",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "_name_or_path",
}
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.(masked_)?bias)$")  # once stored, now computed


def own_layers(target: Target, layers: Sequence[int], dtype: torch.dtype = torch.float32) -> TextModel:
    """Config and weights, copied, of a causal language model that has these layers of the target's alone, in this order, and all
    else of it but towers for images and sound.

    Raises:
        UserError: a layer that the target lacks. NotImplementedError: a wrapper of a text model that transformers does not have.
    """
    if not layers or not all(0 <= i < target.num_layers for i in layers):
        raise UserError(
            f"layers={list(layers)}: target {target.spec!r} has layers 0 to {target.num_layers - 1}"
        )
    whole = text_model(target)
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = len(layers)
    if whole.config is not target.model.config:
        config.tie_word_embeddings = tied(target)
    for key, value in vars(whole.config).items():  # a list with an entry for each layer
        if isinstance(value, list) and len(value) == target.num_layers and "token" not in key:
            setattr(config, key, [value[i] for i in layers])
    tensors: dict[str, Tensor] = {}
    for name, tensor in whole.tensors.items():
        if layer := re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", name):
            for new, old in enumerate(layers):
                if old == int(layer[1]):
                    mine = f"{name[: layer.start(1)]}{new}{name[layer.end(1) :]}"
                    tensors[mine] = tensor.detach().to(dtype, copy=True)
        else:
            tensors[name] = tensor.detach().to(dtype, copy=True)
    return replace(whole, config=config, tensors=tensors)


def adapt(
    target: Target,
    layers: Sequence[int],
    mask_token_id: int,
    *,
    attention: str = "prefix_causal",
    share_embedding: bool = True,
    dtype: torch.dtype = torch.float32,
) -> MaskedLM:
    """A diffusion drafter that starts from these layers of an autoregressive target, in this order, and from its norm.

    The target's shift is kept (DiffuLLaMA, arXiv 2410.17891). `attention`: full or prefix_causal, what `see` says by
    default. `share_embedding`: the target's embedding and head serve, frozen and not stored; else they are copied,
    trained and stored, tied where the target's are.

    Raises:
        UserError: a layer, mask, attention or architecture that does not fit.
    """
    where = f"target {target.spec!r}"
    with refusing(where, "masked_lm", NotImplementedError):
        own = own_layers(target, layers, dtype)
    source = {
        "architectures": list(ADAPTED.architectures),
        "model_type": ADAPTED.model_type,
        "base": own.base,
        "base_config": own.config.to_diff_dict(),
        "layers": list(layers),
        "shift": ADAPTED.shift,
        "attention": attention,
        "mask_token_id": mask_token_id,
        "share_embedding": share_embedding,
        "target": target.spec,
        "target_sha256": target.hash,
    }
    if share_embedding:
        for name in (own.embedding, own.head):
            own.tensors.pop(name, None)
    return _adapted(source, where, own.tensors, target, dtype).to(target.device)


def _adapted(
    source: dict[str, Any], where: str, tensors: dict[str, Tensor], target: Target | None, dtype: torch.dtype
) -> MaskedLM:
    """The network of an adapted drafter's config.json and tensors."""
    lacking = [
        k for k in ("base", "base_config", "attention", "mask_token_id", "share_embedding") if k not in source
    ]
    if lacking:
        raise UserError(f"{where}: missing key {lacking[0]!r}, so this is not an adapted drafter")
    base, kind = str(source["base"]), str(source["attention"])
    if base not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise UserError(f"{where}: its architecture {base!r} can't be adapted{nearest(base, BASES)}")
    if kind not in ATTENTIONS:
        raise UserError(f"{where}: attention={kind!r} is unknown{nearest(kind, ATTENTIONS)}")
    family = replace(
        ADAPTED,
        base=base,
        attention="full" if kind == "full" else "prefix_causal",
        cache="none" if kind == "full" else "exact",
        shift=1 if source.get("shift", 1) else 0,
    )
    config = _config(base, source["base_config"], where)
    shared = target if source["share_embedding"] else None
    if source["share_embedding"]:
        if target is None:
            raise UserError(f"{where}: made for target {source.get('target')!r}, which has to be given")
        sizes = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size}
        for key, value in sizes.items():
            if getattr(config, key) != value:
                raise UserError(
                    f"{where}: {key} is {getattr(config, key)}, target {target.spec!r} has {value}; "
                    f"it was made for {source.get('target')!r}"
                )
        names = embedding_names(_skeleton(base, config, where))
        tensors |= dict(zip(names, (target.embedding_VD, target.head_weight_VD), strict=True))
    with nullcontext() if base in BASES else refusing(where, "masked_lm"):
        model = _filled(family, config, tensors, where, dtype)
    network = MaskedLM(model, _with_ids(family, source, None, config.vocab_size, where), source, shared)
    if base not in BASES:
        check_opened(network, where)
    return network


def from_config(
    values: Mapping[str, Any], where: str = "config.json", dtype: torch.dtype = torch.float32
) -> MaskedLM:
    """A network of a published family with random weights, made of its config.json.

    Raises:
        UserError: no known family, or a value that does not fit.
    """
    family = family_of(values, where)
    config = _config(family.base, _renamed(family, values), where)
    with in_one_line(where):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register()
        )
    return MaskedLM(model, _with_ids(family, values, None, config.vocab_size, where), dict(values))


def _renamed(family: Family, values: Mapping[str, Any]) -> dict[str, Any]:
    """Their config.json under transformers' names; without what only their own code reads."""
    if family.config:
        return {ours: values[key] for key, ours in family.config.items() if values.get(key) is not None}
    return {key: value for key, value in values.items() if key not in _OWN}


def _config(base: str, values: Mapping[str, Any], where: str) -> Any:
    with in_one_line(where):
        return getattr(transformers, base).config_class(**{k: v for k, v in values.items() if k not in _OWN})


def _skeleton(base: str, config: Any, where: str) -> Any:
    """The architecture without memory."""
    with in_one_line(where), torch.device("meta"):
        return getattr(transformers, base)(config)


def _with_ids(
    family: Family, values: Mapping[str, Any], folder: Path | None, vocab_size: int, where: str
) -> Family:
    """The record with this checkpoint's mask and block."""
    mask = values.get("mask_token_id")
    if mask is None and folder is not None:
        mask = _tokenizer_mask(folder)
    if mask is None:
        mask = family.mask_token_id
    if type(mask) is not int or not 0 <= mask < vocab_size:
        raise UserError(f"{where}: mask_token_id={mask!r} is not within 0..{vocab_size - 1}")
    block = family.block_size
    if family.attention == "block_causal":
        block = values.get("block_size", block)
        if type(block) is not int or block < 1:
            raise UserError(f"{where}: block_size={block!r} must be a whole number of at least 1")
    return replace(family, mask_token_id=mask, block_size=block)


def _tokenizer_mask(folder: Path) -> int | None:
    """The id of the mask token that tokenizer_config.json names, if it names one."""
    path = folder / "tokenizer_config.json"
    values = read_object(path) if path.is_file() else {}
    named = values.get("mask_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = values.get("added_tokens_decoder")
    for index, token in added.items() if isinstance(added, dict) else ():
        if (
            text is not None
            and isinstance(token, dict)
            and token.get("content") == text
            and index.isdecimal()
        ):
            return int(index)
    return None


def _filled(family: Family, config: Any, tensors: dict[str, Tensor], where: str, dtype: torch.dtype) -> Any:
    """The transformers model that holds these tensors, named as transformers names them, and no other."""
    skeleton = _skeleton(family.base, config, where)
    expected = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    embedding, head = embedding_names(skeleton)
    if config.tie_word_embeddings:
        del expected[head]
        own = tensors.pop(head, None)
        if own is not None and embedding in tensors and not torch.equal(own, tensors[embedding]):
            raise UserError(f"{where}: {family.theirs(head)!r} differs from the embedding that it is tied to")
    for name in sorted(expected.keys() - tensors.keys()):
        raise UserError(f"{where}: its checkpoint misses {family.theirs(name)!r}")
    for name in sorted(tensors.keys() - expected.keys()):
        raise UserError(f"{where}: its checkpoint has an unknown tensor {family.theirs(name)!r}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"{where}: {family.theirs(name)} has shape {tuple(tensors[name].shape)}, expected {tuple(shape)}"
            )
    quiet_loading()
    with in_one_line(where):
        return getattr(transformers, family.base).from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=register()
        )


# ---- files ----


def load_masked_lm(
    spec: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    target: Target | None = None,
) -> MaskedLM:
    """A published masked-diffusion language model, or an adapted drafter, from a folder or hub id; in evaluation mode.

    Args:
        target: for an adapted drafter that shares its target's embedding and head.
        trust_remote_code: must be False: the families are mapped onto transformers' own classes.

    Raises:
        UserError: no known family; missing, unknown, torn or misshapen tensors, or values that are no numbers.
    """
    if trust_remote_code:
        raise UserError("trust_remote_code=True: remote code is never run, the known families do without it")
    folder = model_folder(str(spec), "drafter", ["*.json", "*.safetensors"], revision)
    values = read_config(folder)
    adapted = values.get("architectures") == list(ADAPTED.architectures)
    family = ADAPTED if adapted else family_of(values, str(spec))
    files = _weight_files(folder)
    if not files:
        folder = model_folder(str(spec), "drafter", ["*.json", "pytorch_model*.bin"], revision)
        files = _weight_files(folder)
    if not files:
        raise UserError(f"drafter {str(spec)!r}: {folder} has neither {_SAFE} nor pytorch_model.bin")
    check_sizes(folder, f"drafter {str(spec)!r}")
    tensors = {
        family.ours(name): tensor
        for file in files
        for name, tensor in _tensors(file).items()
        if not _BUFFER.search(name)
    }
    if adapted:
        return _adapted(values, str(folder), tensors, target, dtype).to(device)
    config = _config(family.base, _renamed(family, values), str(folder))
    if family.resized:
        embedding, _ = embedding_names(_skeleton(family.base, config, str(folder)))
        config.vocab_size = len(tensors.get(embedding, range(config.vocab_size)))
    model = _filled(family, config, tensors, str(folder), dtype)
    return MaskedLM(model, _with_ids(family, values, folder, config.vocab_size, str(folder)), values).to(
        device
    )


class _Index(TypedDict):
    weight_map: dict[str, str]


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: safetensors, else pickled tensors; in one piece or as an index lists them."""
    for whole in (_SAFE, "pytorch_model.bin"):
        if (folder / whole).is_file():
            return [folder / whole]
        index = folder / f"{whole}.index.json"
        if index.is_file():
            names = sorted(set(convert(read_json(index), _Index, "", str(index))["weight_map"].values()))
            for name in names:
                if Path(name).name != name or not (folder / name).is_file():
                    raise UserError(f"{index}: names {name!r}, which is not in the folder")
            return [folder / name for name in names]
    return []


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            tensors = load_file(str(file))
        else:
            tensors = load_tensors(file, map_location="cpu")
    except (SafetensorError, OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{file}: not readable ({(str(error).splitlines() or [''])[0]})") from None
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise UserError(f"{file}: is no table of tensors")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{file}: {name} holds values that are no numbers")
    return tensors


def save_masked_lm(network: MaskedLM, folder: Path, max_shard_size: str = "5GB") -> None:
    """Write the folder in the layout that the network was read from: its family's names, its own config.json.

    Raises:
        ValueError: LoRA weights are not merged.
    """
    if is_lora(network):
        raise ValueError("merge_lora(network) before it is saved")
    folder.mkdir(parents=True, exist_ok=True)
    tied = network.model.config.tie_word_embeddings
    tensors = {
        network.family.theirs(name): tensor.detach().cpu().contiguous()
        for name, tensor in network.model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    write_weights(tensors, folder, max_shard_size)
    _write_json(folder / "config.json", network.source)


def write_weights(tensors: dict[str, Tensor], folder: Path, max_shard_size: str = "5GB") -> None:
    """model.safetensors, or shards with their index."""
    split = split_torch_state_dict_into_shards(
        tensors, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for old in folder.glob("model*.safetensors*"):  # another number of shards
        old.unlink()
    for file, names in split.filename_to_tensors.items():
        part = {name: tensors[name] for name in names}
        write_atomically(folder / file, partial(save_file, part, metadata={"format": "pt"}))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        _write_json(folder / f"{_SAFE}.index.json", index)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_atomically(path, lambda part: part.write_text(json.dumps(values, indent=2) + "\n"))


# ---- LoRA ----
