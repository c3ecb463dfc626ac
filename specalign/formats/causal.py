"""An autoregressive drafter as an ordinary causal-LM folder."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor

from specalign.common.files import write_json, write_text
from specalign.formats.kinds import RECORD
from specalign.formats.weights import write_weights
from specalign.models.causal import CausalDrafter


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
