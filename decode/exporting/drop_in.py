"""The format `custom_generate`: transformers runs it as a user's script does, and so it is compared, beside plain decoding and ours."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from align.common.errors import UserError, in_one_line
from align.common.files import load_safetensors
from align.common.schema import read_config
from align.common.text import plural
from align.models.block import BlockDrafter
from align.models.checkpoints.block import ARCHITECTURE
from align.target.interface import install
from align.target.model import Target
from decode.exporting.base import Format
from decode.exporting.folder import Exported
from decode.exporting.formats import check_last_layer
from decode.exporting.ladder import rest
from decode.exporting.verdict import Decoded, Verdict
from decode.portable import checks, generate
from decode.portable import drafter as network

READER = "generate(custom_generate=…)"


def custom_generate(drafter: BlockDrafter) -> Exported:
    """A repository that transformers' `generate` runs: the drafter's own files, its network and its loop as source.

    Raises:
        UserError: a target whose tokens can't be taken back or that the loop can't run, a tapped last layer.
    """
    c, target = drafter.config, drafter.target
    if target.anatomy.recurrent:
        raise UserError(
            f"--format custom_generate: {target.spec!r} keeps a state that transformers' cache can't take back; "
            "use decode.custom_generate here"
        )
    if c.context == "taps":
        check_last_layer(drafter, "custom_generate")
    tensors: dict[str, Tensor] = {name: p.detach() for name, p in drafter.named_parameters()}
    if drafter.draft_vocab is not None:
        tensors["draft_vocab"] = drafter.draft_vocab.to(torch.int32)
    if drafter.head is not None:
        tensors["head"] = drafter.head
    config = {"architectures": [ARCHITECTURE], "model_type": "block_drafter", **c.to_dict()}
    refused = f"--format custom_generate: its loop can't run {target.spec!r}, use decode.custom_generate here"
    with in_one_line(refused):
        _try(config, tensors, target)
    sources = {"generate.py": generate, "checks.py": checks, "drafter.py": network}
    files = {
        f"custom_generate/{name}": inspect.getsource(module).replace("from decode.portable.", "from .")
        for name, module in sources.items()
    }
    files["custom_generate/requirements.txt"] = "torch>=2.5\ntransformers>=5.0\nsafetensors\n"
    return Exported(config, tensors, files=files)


def _try(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> None:
    """Write a few tokens as the folder will: some models take no cache of transformers' as the loop uses it, or none but their own."""
    model, ids = target.model, torch.arange(4, device=target.device)[None]
    criteria = StoppingCriteriaList([MaxLengthCriteria(ids.shape[1] + 4)])
    model.set_attn_implementation("eager")
    try:
        drafter = network.Drafter(config, tensors, model)
        generate.decode(model, ids, LogitsProcessorList(), criteria, GenerationConfig(), drafter, [], None)
    finally:
        install(model, own=target.attention == "its own, eager")


class DropIn(Format):
    """Compared by what transformers itself writes with the folder."""

    def compare(self, drafter: BlockDrafter, verdict: Verdict, model: Any, texts: Decoded) -> None:
        """Settings and tensors, outputs, and drafts accepted in each call. Writes into the verdict."""
        with in_one_line(f"{verdict.folder}: transformers can't run it"):
            held = load_safetensors(verdict.folder / "model.safetensors")
            found = rest(self.make(drafter), read_config(verdict.folder), held, READER)
            verdict.add(READER, found.same, found.line)
            both = [
                _generated(verdict, model, p, len(o))
                for p, o in zip(texts.prompts, texts.outputs, strict=True)
            ]
            same = texts.as_plain([tokens for tokens, _ in both])
            line = f"outputs: {same} of {plural(len(both), 'prompt')} as plain greedy ones"
            verdict.add(READER, same == len(both), line)
            verdict.add(READER, *texts.alike([accepted for _, accepted in both], drafter.config.block_size))


@torch.no_grad()
def _generated(verdict: Verdict, model: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """What transformers writes with the folder, and the accepted drafts of each call."""
    ids, accepted = torch.tensor([prompt], device=model.device), list[int]()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        custom_generate=str(verdict.folder), trust_remote_code=True, accepted=accepted,
    )  # fmt: skip
    return [int(t) for t in out[0, len(prompt) :]], accepted
