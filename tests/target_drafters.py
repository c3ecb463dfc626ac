"""Drafters made for tiny targets, trained for some steps on the target's own words: what they write against plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from align.common.batch import Anchors, Step
from align.config.parser import load_recipe
from align.config.recipe import DrafterConfig
from align.data import packing
from align.data import shards as data
from align.models.block import BlockDrafter
from align.target.model import Target
from align.training.block_module import BlockDrafterModule
from align.training.makers import from_target
from decode.drafters.block import BlockProposer
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
