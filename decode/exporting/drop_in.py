"""Does a `custom_generate` folder do what was trained? transformers runs it as a user's script does, beside plain decoding and ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from safetensors.torch import load_file

from align.common.text import plural
from align.models.block import BlockDrafter
from align.target.loading import read_config
from decode.exporting.counts import Counts
from decode.exporting.ladder import rest
from decode.exporting.registry import FORMATS
from decode.exporting.verdict import Verdict

NAME = "generate(custom_generate=…)"


def compare(
    drafter: BlockDrafter,
    verdict: Verdict,
    model: Any,
    prompts: Sequence[list[int]],
    outputs: Sequence[list[int]],
    accepted: Sequence[list[int]],
) -> None:
    """Outputs, and drafts accepted in each call, over prompts. Writes into the verdict.

    Args:
        model: the target as transformers runs it. outputs: plain greedy ones. accepted: by our decoder, chains of drafts.
    """
    held = load_file(verdict.folder / "model.safetensors")
    found = rest(FORMATS[verdict.format].make(drafter), read_config(verdict.folder), held, NAME)
    verdict.add(NAME, found.same, found.line)
    written, theirs = list[list[int]](), list[list[int]]()
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, counts = generated(verdict, model, prompt, len(output))
        written.append(tokens)
        theirs.append(counts)
    same = sum(a == b for a, b in zip(outputs, written, strict=True))
    verdict.add(
        NAME,
        same == len(outputs),
        f"outputs: {same} of {plural(len(outputs), 'prompt')} as plain greedy ones",
    )
    own, other = (Counts.of(list(each), drafter.config.block_size) for each in (accepted, theirs))
    equal = sum(a == b for a, b in zip(accepted, theirs, strict=True))
    verdict.add(
        NAME,
        abs(own.tau - other.tau)
        < 0.02 * own.tau,  # other sums turn a near-tie of two drafts; a fault turns many
        f"{equal} of {plural(len(outputs), 'prompt')} accepted call for call alike; ours: {own.line}, theirs: {other.line}",
    )


@torch.no_grad()
def generated(verdict: Verdict, model: Any, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
    """What transformers writes with the folder, and the accepted drafts of each call."""
    ids, accepted = torch.tensor([prompt], device=model.device), list[int]()
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
        custom_generate=str(verdict.folder), trust_remote_code=True, accepted=accepted,
    )  # fmt: skip
    return [int(t) for t in out[0, len(prompt) :]], accepted
