"""From a drafter to exported folders and a verdict on each: what is written is read back and compared on the user's own target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from align.common.errors import UserError
from align.common.hub import local_path, model_folder
from align.common.text import plural
from align.models.block import BlockDrafter
from align.models.block_checkpoint import load_drafter
from align.target.loading import load_target
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.exporting import causal
from decode.exporting.folder import card_of, measured_lines, write_block
from decode.exporting.formats import FORMATS
from decode.exporting.ladder import climb, replay, stock_model
from decode.exporting.reader import Reader, TransformersReader, readers
from decode.exporting.verdict import Verdict
from decode.suites.registry import prompts_of
from decode.suites.tokenized import tokenize_prompts

BLOCKS = ("block", "variable_prefix")


def exported(
    drafter: str,
    role: str,
    target: str,
    folders: Mapping[str, Path],
    *,
    dtype: str = "bfloat16",
    device: str = "auto",
    trust_remote_code: bool = False,
    limit: int = 4,
    max_new_tokens: int = 48,
) -> list[Verdict]:
    """Write a drafter in formats, each into its folder, and compare each with it over built-in prompts.

    Args:
        drafter: folder or hub id. role: its kind. target: as `load_target` takes it; opened in fp32.
        dtype: of the written weights. limit: prompts; 0 = nothing is compared.

    Raises:
        UserError: a kind of drafter, or a drafter, that a format can't hold; folders of something else.
    """
    if role == "autoregressive":
        return [causal.export(drafter, target, name, out) for name, out in folders.items()]
    if role not in BLOCKS:
        raise UserError(
            f"--drafter={drafter}: a standalone diffusion drafter is of no engine's format; train with drafter.kind=block and "
            "drafter.context=taps (recipe=smollm2_taps)"
        )
    if "draft_model" in folders:
        raise UserError(
            "--format draft_model: an ordinary language model, which a block drafter is not; --format dflash, or train with "
            "drafter.kind=autoregressive"
        )
    opened = load_target(target, "float32", device, trust_remote_code=trust_remote_code)
    network = load_drafter(drafter, opened)
    for name in folders:  # before anything is written
        FORMATS[name].make(network)
    source = (
        local_path(drafter)
        if local_path(drafter).is_dir()
        else model_folder(drafter, "drafter", ["config.json", "README.md"])
    )
    verdicts = list[Verdict]()
    for name, out in folders.items():
        drafts = network.config.block_size
        card = card_of(source, name, network.config.target, out.name, drafts, measured_lines(source))
        made = write_block(network, name, out, getattr(torch, dtype), card)
        serve = FORMATS[name].serve(network.config.target, str(out), drafts)
        verdicts.append(Verdict(name, out, notes=list(made.notes), serve=serve))
    if limit:
        compare(network, verdicts, limit, max_new_tokens)
    return verdicts


def compare(drafter: BlockDrafter, verdicts: Sequence[Verdict], limit: int, max_new_tokens: int) -> None:
    """Climb the ladder of each export, and decode prompts greedily with all of them. Writes into the verdicts."""
    target = drafter.target
    suites, _ = prompts_of("builtin", limit=limit)
    prompts = [tokens for _, tokens in tokenize_prompts(target, suites[0].prompts)[0]]
    if not prompts:
        raise UserError(f"target {target.spec!r} takes none of the built-in prompts")
    model = stock_model(target)
    plain, ours = Decoder(target), Decoder(target, BlockProposer(drafter, tree_nodes=0))
    outputs = [plain.generate(prompt, max_new_tokens=max_new_tokens).tokens for prompt in prompts]
    calls = [ours.generate(prompt, max_new_tokens=max_new_tokens) for prompt in prompts]
    for verdict in verdicts:
        for reader in readers(verdict.format, verdict.folder, model):
            rungs = climb(drafter, verdict.format, reader, prompts[0])
            for rung in rungs:
                verdict.add(reader.name, rung.same, rung.line)
            if rungs[-1].same:
                _whole(verdict, reader, prompts, outputs, [c.accepted for c in calls], drafter)


def _whole(
    verdict: Verdict,
    reader: Reader,
    prompts: list[list[int]],
    outputs: list[list[int]],
    ours: list[list[int]],
    drafter: BlockDrafter,
) -> None:
    """Rounds and accepted drafts over whole outputs, and transformers' own generation where it is the reader."""
    theirs = [replay(reader, p, o).accepted for p, o in zip(prompts, outputs, strict=True)]
    equal = sum(a == b for a, b in zip(ours, theirs, strict=True))
    most = drafter.config.block_size
    line = (
        f"whole outputs: {equal} of {plural(len(ours), 'prompt')} accepted call for call alike; "
        f"{_counts('ours', ours, most)}, {_counts('theirs', theirs, most)}"
    )
    # another order of sums may turn a near-tie of two drafts; a fault turns many
    verdict.add(reader.name, abs(_tau(ours) - _tau(theirs)) < 0.02 * _tau(ours), line)
    if isinstance(reader, TransformersReader):
        same = sum(_generated(reader, p, len(o)) == o for p, o in zip(prompts, outputs, strict=True))
        verdict.add(
            reader.name,
            same == len(outputs),
            f"generate(assistant_model=…): {same} of {len(outputs)} outputs as plain greedy ones",
        )


def _counts(whose: str, calls: list[list[int]], most: int) -> str:
    flat = [a for one in calls for a in one]
    positions = " ".join(str(sum(a > k for a in flat)) for k in range(most))
    return f"{whose}: {len(flat)} calls, τ {_tau(calls):.3f}, accepted at each position {positions}"


def _tau(calls: list[list[int]]) -> float:
    flat = [a for one in calls for a in one]
    return 1 + sum(flat) / max(len(flat), 1)


@torch.no_grad()
def _generated(reader: TransformersReader, prompt: list[int], count: int) -> list[int]:
    """transformers' own speculative decoding, greedy."""
    ids = torch.tensor([prompt], device=reader.model.device)
    words: dict[str, Any] = {"assistant_model": reader.assistant, "speculation_type": "dflash"}
    out = reader.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **words
    )
    return [int(t) for t in out[0, len(prompt) :]]
