"""Drafters made for tiny targets, trained for some steps on the target's own words: what they write against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from align.common.batch import Anchors, Step
from align.common.errors import UserError
from align.config.drafter import DrafterConfig
from align.config.parser import load_recipe
from align.data import packing
from align.data import shards as data
from align.makers.block import from_target
from align.makers.causal import make_causal
from align.makers.standalone import make_standalone
from align.models.block import BlockDrafter
from align.models.checkpoints.causal import save_causal
from align.models.checkpoints.standalone import load_standalone, save_standalone
from align.target.loading import load_target
from align.target.model import Target
from align.training.block_module import BlockDrafterModule
from decode.drafters.autoregressive import AutoregressiveDrafter
from decode.drafters.block import BlockProposer
from decode.drafters.diffusion import DiffusionProposer
from decode.engine.decoder import Decoder
from decode.speculation.sampling import Sampling
from tests.target_models import WINDOW

STEPS, BLOCK = 20, 3
COUPLED = Sampling(temperature=1.0, seed=3)
"""For the verifier `gumbel`, under which outputs with and without drafts are the same."""


def trained_drafter(
    target: Target, texts: Sequence[Sequence[int]], context: str, steps: int = STEPS, **options: Any
) -> BlockDrafter:
    """A block drafter that has seen some packed texts. Raises UserError where none can be made."""
    sizes = {"taps": 2, "markov_rank": 8, "block_size": BLOCK, **options}
    drafter = from_target(target, DrafterConfig(context=context, **sizes), None)  # type: ignore[arg-type]
    samples = data.from_lists([list(text) for text in texts], [WINDOW] * len(texts), [0.0] * len(texts))
    batch = packing.collate(packing.pack(samples, 2 * max(map(len, texts)), seed=0)[:2])
    rows, places = batch.tokens_BL.shape[0], [WINDOW - 1, WINDOW + 4, WINDOW + 11]
    valid = torch.ones(rows, len(places), BLOCK, dtype=torch.bool)
    step = Step(batch, Anchors(torch.tensor([places] * rows), valid), places=tuple(range(rows)))
    module = BlockDrafterModule(drafter, load_recipe(["recipe=debug_block"]))
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    for _ in range(steps):
        found, counted, _ = module.draft_statistics(step)
        loss = module.objective.per_position(found, counted).mean()
        assert bool(loss.isfinite())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def compared(target: Target, drafter: BlockDrafter, prompts: list[list[int]], new: int) -> str:
    """`yes`, or what differs: greedy chains, trees where they may branch, coupled outputs at temperature 1, four requests at once."""
    plain = [Decoder(target).generate(p, max_new_tokens=new).tokens for p in prompts]
    chain = Decoder(target, BlockProposer(drafter))
    if [chain.generate(p, max_new_tokens=new).tokens for p in prompts] != plain:
        return "wrong: greedy"
    if [o.tokens for o in chain.generate_batch(prompts, batch_size=4, max_new_tokens=new)] != plain:
        return "wrong: batch"
    if not target.chains_only:
        tree = Decoder(target, BlockProposer(drafter, tree_nodes=6))
        if [tree.generate(p, max_new_tokens=new).tokens for p in prompts[:2]] != plain[:2]:
            return "wrong: tree"
    found, wanted = (
        [
            Decoder(target, d, "gumbel").generate(p, max_new_tokens=new, sampling=COUPLED).tokens
            for p in prompts[:2]
        ]
        for d in (BlockProposer(drafter), None)
    )
    return "yes" if found == wanted else "wrong: coupled"


def of_own_layers(target: Target, kind: str, prompts: list[list[int]], new: int) -> str:
    """`yes` for a saved drafter out of the target's own layers with which greedy output is plain decoding's, `refused` for one
    line."""
    options = DrafterConfig(kind=kind, layers=2, block_size=BLOCK)  # type: ignore[arg-type]
    with TemporaryDirectory() as folder:
        try:
            if kind == "autoregressive":
                save_causal(make_causal(target, options), Path(folder))
                served = load_target(folder, "float32", "cpu", fast=False)
                drafter: Any = AutoregressiveDrafter(served, BLOCK)
            else:
                save_standalone(make_standalone(target, options), Path(folder))
                drafter = DiffusionProposer(load_standalone(folder, target), BLOCK)
        except UserError as error:
            fine = "drafter.kind=" in str(error) or "target" in str(error)
            return "refused" if fine else f"wrong: {error}"
        plain, found = (
            [Decoder(target, d).generate(p, max_new_tokens=new).tokens for p in prompts]
            for d in (None, drafter)
        )
    return "yes" if plain == found else "wrong: greedy"
