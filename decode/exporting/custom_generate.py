"""`custom_generate`: a folder that transformers' `generate` runs, with the drafter's network and
loop as source."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from decode.portable import checks, generate
from decode.portable import drafter as network
from specalign.common.errors import UserError, in_one_line
from specalign.common.schema import JsonObject
from specalign.formats.block import load_drafter, pack_drafter
from specalign.formats.dflash import Exported, check_last_layer
from specalign.lm.masks import install
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter

REQUIREMENTS = "torch>=2.5\ntransformers>=5.0\nsafetensors\n"


def make_custom_generate(drafter: BlockDrafter) -> Exported:
    """The drafter's own files, with the modules of `decode.portable`.

    Raises:
        UserError: a target whose cache can't be rolled back or that the loop can't run, a tapped
            last layer.
    """
    target = drafter.target
    if target.anatomy.recurrent:
        raise UserError(
            f"--format custom_generate: {target.spec!r} keeps a state that transformers' cache "
            "can't take back; use decode.custom_generate here"
        )
    check_last_layer(drafter, "custom_generate")
    config, tensors = pack_drafter(drafter)
    with in_one_line(
        f"--format custom_generate: its loop can't run {target.spec!r}, use decode.custom_generate "
        "here"
    ):
        _try_loop(config, tensors, target)
    files = {"custom_generate/requirements.txt": REQUIREMENTS}
    for name, module in {"generate": generate, "checks": checks, "drafter": network}.items():
        source = inspect.getsource(module).replace("from decode.portable.", "from .")
        files[f"custom_generate/{name}.py"] = source
    return Exported(config, tensors, files=files)


def _try_loop(config: JsonObject, tensors: dict[str, Tensor], target: Target) -> None:
    """Generate a few tokens: some models take no cache of transformers', or none but their own."""
    model = target.model
    ids = torch.arange(4, device=target.device)[None]
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + 4)])
    model.set_attn_implementation("eager")
    try:
        drafter = network.Drafter(config, tensors, model)
        generate.decode(
            model, ids, LogitsProcessorList(), criteria, GenerationConfig(), drafter, [], None
        )
    finally:
        install(model, own=target.attention == "its own, eager")


def restore_custom_generate(held: Exported, folder: Path, target: Target) -> BlockDrafter:
    """The folder is in this project's own layout."""
    return load_drafter(folder, target)


@torch.no_grad()
def run_generate(
    folder: Path, model: Any, prompt: list[int], count: int
) -> tuple[list[int], list[int]]:
    """transformers' greedy output with an exported folder, and the accepted drafts of each
    round."""
    ids = torch.tensor([prompt], device=model.device)
    accepted: list[int] = []
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        custom_generate=str(folder), trust_remote_code=True, accepted=accepted,
    )  # fmt: skip
    return out[0, len(prompt) :].tolist(), accepted
