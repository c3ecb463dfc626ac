"""Drafters in the layouts of SEDD, MDLM, RADD and BD3-LM on the hub, read; the layout of those
trained here, read and written.

| layout | config.json | tensors |
|---|---|---|
| SEDD, RADD | `tokens`, `noise`, `model` | without a prefix |
| MDLM, BD3-LM | flat | under `backbone.`; BD3-LM also `sampling_eps_min`, `sampling_eps_max` |
| ours | `model_type` `ddit`: the fields of `DDiTConfig`, graph, noise and mask | without a prefix |

Earlier versions wrote the published layouts, with the keys `attention` and `block_size` where a
drafter's attention is not the published one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specalign.common.errors import UserError
from specalign.common.files import write_atomically, write_json
from specalign.common.hub import model_folder
from specalign.common.schema import JsonObject, read_config
from specalign.formats.sedd_mdlm_config import (
    CLIPPED,
    FAMILIES,
    OWN,
    NetworkPlan,
    ScheduleSpec,
    read_plan,
    write_plan,
)
from specalign.formats.weights import check_shapes, read_folder
from specalign.models.ddit import DDiT
from specalign.models.ddit_layers import Rotary

_BACKBONE = "backbone."
_EMBEDDING = "vocab_embed.embedding"


@dataclass(frozen=True)
class PublishedNetwork:
    """A published network, in fp32 and evaluation mode, and what its numbers mean.

    family: of `FAMILIES`, or `OWN`.
    """

    network: DDiT
    family: str
    schedule: ScheduleSpec
    mask_id: int | None

    @property
    def prediction(self) -> str:
        """`log_score` (SEDD), or `logits`: a softmax over the tokens without the mask."""
        scored = self.family == "sedd" or self.network.config.scale_by_sigma
        return "log_score" if scored else "logits"


def load_published(source: str | Path, attention_backend: str = "sdpa") -> PublishedNetwork:
    """Load a folder or hub id.

    `attention_backend`: as for `DDiT`.

    Raises:
        UserError: missing or unreadable files, or tensors or a config that do not fit.
    """
    names = ["config.json", "model.safetensors", "pytorch_model.bin"]
    folder = model_folder(str(source), "drafter", names)
    values, tensors = read_config(folder), read_folder(folder, f"drafter {str(source)!r}")
    prefix = _BACKBONE if any(name.startswith(_BACKBONE) for name in tensors) else ""
    if prefix + _EMBEDDING not in tensors:
        raise UserError(
            f"{folder}: no tensor {_EMBEDDING!r}: not a checkpoint of {', '.join(FAMILIES)}"
        )
    family = _find_family(values, tensors, prefix)
    plan = read_plan(values, family, f"{folder}/config.json")
    with torch.device("meta"):
        network = DDiT(plan.config, attention_backend)
    expected = {prefix + name: tensor.shape for name, tensor in network.state_dict().items()}
    clip = CLIPPED if family == "bd3lm" and any(key in tensors for key in CLIPPED) else ()
    expected |= dict.fromkeys(clip, torch.Size())
    check_shapes(tensors, expected, str(folder))
    state = {
        name: tensors[prefix + name].to(torch.float32, copy=True) for name in network.state_dict()
    }
    table = Rotary(plan.config.head_dim).inv_freq
    # half precision rounds it by 0.4%
    if not torch.allclose(state["rotary_emb.inv_freq"], table, rtol=0.01):
        raise UserError(f"{folder}: rotary_emb.inv_freq is not that of base 10000")
    network.load_state_dict(state, assign=True)
    schedule = plan.schedule
    if clip:
        low, high = (float(tensors[key]) for key in clip)
        schedule = replace(schedule, mask_rates=(low, high))
    return PublishedNetwork(network.eval(), family, schedule, plan.mask_id)


def _find_family(values: JsonObject, tensors: dict[str, Tensor], prefix: str) -> str:
    if values.get("model_type") == OWN:
        return OWN
    if prefix:
        return "bd3lm" if values.get("model_type") == "bd3lm" else "mdlm"
    return "radd" if "blocks.0.norm1.bias" in tensors else "sedd"


def save_ddit(network: DDiT, folder: Path, schedule: ScheduleSpec, mask_id: int | None) -> None:
    """Write config.json (`write_plan`) and model.safetensors, in the network's own precision."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in network.state_dict().items()}
    write_atomically(
        folder / "model.safetensors",
        lambda part: save_file(tensors, str(part), metadata={"format": "pt"}),
    )
    plan = NetworkPlan(network.config, schedule, mask_id)
    write_json(folder / "config.json", write_plan(plan))
