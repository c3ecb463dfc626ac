"""Saving and loading standalone diffusion drafters: the network's folder, plus `drafter.json` with
what its layout lacks; autoregressive ones are ordinary causal-LM folders."""

import copy
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from specalign.common.checksums import check_checksums
from specalign.common.errors import UserError, in_one_line
from specalign.common.files import write_json, write_text
from specalign.common.hub import local_path, model_folder
from specalign.common.schema import JsonObject, convert, read_config, read_object
from specalign.formats.block import load_drafter
from specalign.formats.kinds import RECORD, is_block, is_ddit
from specalign.formats.masked_lm import load_masked_lm, save_masked_lm
from specalign.formats.sedd_mdlm import load_published, save_ddit
from specalign.formats.weights import write_weights
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.models.causal import CausalDrafter
from specalign.models.ddit import DDiT
from specalign.models.masked_lm import MaskedLM, merge_lora
from specalign.models.standalone import DiffusionConfig, DiffusionDrafter


def architecture(network: DDiT | MaskedLM) -> JsonObject:
    """What tells one network's checkpoints from another's."""
    if isinstance(network, DDiT):
        return asdict(network.config)
    c = network.model.config
    return {
        "family": network.family.name,
        "hidden_size": c.hidden_size,
        "layers": c.num_hidden_layers,
        "vocab_size": c.vocab_size,
        "attention": network.family.attention,
    }


def save_standalone(drafter: DiffusionDrafter, folder: Path) -> None:
    """Write the folder: weights and config.json (of a DDiT in our own layout, of a masked language
    model in its family's), and `drafter.json`. Low-rank updates are merged."""
    network, config = drafter.network, drafter.config
    if isinstance(network, MaskedLM):
        merge_lora(network)
        save_masked_lm(network, folder)
    else:
        save_ddit(network, folder, config.schedule, drafter.mask_id)
    write_json(folder / RECORD, config.to_dict())


def load_standalone(
    spec: str | Path, target: Target, attention_backend: str = "sdpa", vocab_size: int | None = None
) -> DiffusionDrafter:
    """A saved drafter, or a published checkpoint of any known family, in fp32, for `target`. Raises
    UserError for missing or unreadable files, or a vocabulary that is not the target's.
    attention_backend: of a DDiT, a name of `specalign.lm.attention.BACKENDS`. vocab_size: of the
    drafter's own tokenizer, if it is not the target's; the network may have more rows."""
    path = local_path(spec)
    check_checksums(path)
    record = read_object(path / RECORD) if (path / RECORD).is_file() else {}
    network: DDiT | MaskedLM
    process: JsonObject = {"prediction": "logits"}
    if is_ddit(read_config(model_folder(str(spec), "drafter", ["config.json"]))):
        network, process = load_published(spec, attention_backend)
    else:
        network = load_masked_lm(spec, target)
    values = {
        "block_size": 8,
        "vocab_size": target.vocab_size,
        "target": target.spec,
        "target_sha256": target.hash,
        "network": architecture(network),
        **process,
        **record,
    }
    if vocab_size is not None:
        values["vocab_size"] = vocab_size
    with in_one_line(f"drafter {spec}"):
        config = convert(values, DiffusionConfig, "", RECORD)
        drafter = DiffusionDrafter(network, config, target, padded=vocab_size is not None)
        if vocab_size is None and config.vocab_size != target.vocab_size:
            sizes = f"drafter {config.vocab_size}, target {target.spec!r} {target.vocab_size}"
            raise UserError(f"vocabulary mismatch: {sizes}; pass --drafter-tokenizer")
    return drafter.to(target.device)


def save_causal(
    drafter: CausalDrafter, folder: Path, weights: dict[str, Tensor] | None = None
) -> None:
    """Write the folder: an ordinary causal LM in fp32 with the target's tokenizer, and
    `drafter.json`. `weights`: replace its own parameters."""
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
    target.tokenizer.save_pretrained(str(folder))
    generation = target.model.generation_config.to_json_string()
    write_text(folder / "generation_config.json", generation)
    write_json(folder / RECORD, {"kind": "autoregressive", **drafter.config.to_dict()})
    write_text(folder / "config.json", config.to_json_string())


def open_drafter(spec: str | Path, target: Target) -> BlockDrafter | DiffusionDrafter:
    """A block drafter or a standalone one by its folder or hub id. Raises UserError for neither."""
    if is_block(read_config(model_folder(str(spec), "drafter", ["config.json"]))):
        return load_drafter(spec, target)
    return load_standalone(spec, target)
