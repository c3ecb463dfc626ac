"""Drafters made for tiny targets, trained for some steps on the target's own words: what they write against plain decoding."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from align.config.drafter import DrafterConfig
from align.config.parser import load_recipe
from align.data import packing
from align.makers.block import from_target
from align.makers.standalone import make_causal, make_standalone
from align.training.block_module import BlockDrafterModule
from decode.engine.decoder import Decoder
from decode.proposers.autoregressive import AutoregressiveProposer
from decode.proposers.block import BlockProposer
from decode.proposers.diffusion import DiffusionProposer
from specalign.common.batch import Anchors, Step
from specalign.common.errors import UserError
from specalign.formats.standalone import load_standalone, save_causal, save_standalone
from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.models.block import BlockDrafter
from specalign.rows import shards as data
from tests.compared import Plain, Same, same
from tests.target_models import WINDOW

STEPS, BLOCK = 20, 3
SEED = 3
"""Of outputs at temperature 1 under the verifier `gumbel`, which are the same with and without drafts."""


def trained_drafter(
    target: Target, texts: Sequence[Sequence[int]], context: str, steps: int = STEPS, **options: Any
) -> BlockDrafter:
    """A block drafter that has seen some packed texts. Raises UserError where none can be made."""
    sizes = {"taps": 2, "markov_rank": 8, "block_size": BLOCK, **options}
    drafter = from_target(target, DrafterConfig(context=context, **sizes), None)  # type: ignore[arg-type]
    count = len(texts)
    samples = data.from_lists([*map(list, texts)], [WINDOW] * count, [0.0] * count)
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


def cell(check: Same) -> str:
    """`yes` for outputs that are plain decoding's; `a tie` where they part, and rounding alone decided there (`examine`)."""
    return "yes" if check.identical == check.compared else "a tie" if not check.bugs else "wrong"


def compared(target: Target, drafter: BlockDrafter, prompts: list[list[int]], new: int) -> str:
    """`yes`, `a tie`, or what differs: greedy chains, trees where they may branch, coupled outputs at temperature 1, four requests at
    once."""
    plain, few = Plain(Decoder(target), prompts, new, None), prompts[:2]
    chain = Decoder(target, BlockProposer(drafter))
    checks = {"greedy": same(plain, chain)}
    batch = [o.tokens for o in chain.generate_batch(prompts, batch_size=4, max_new_tokens=new)]
    alone = [chain.generate(p, max_new_tokens=new).tokens for p in prompts]
    if batch not in (alone, [plain.output(i) for i in range(len(prompts))]):
        return "wrong: batch"
    if not target.chains_only:
        tree = Decoder(target, BlockProposer(drafter, tree_nodes=6))
        checks["tree"] = same(Plain(Decoder(target), few, new, None), tree)
    coupled = Plain(Decoder(target, None, "gumbel"), few, new, SEED)
    checks["coupled"] = same(coupled, Decoder(target, BlockProposer(drafter), "gumbel"))
    cells = {name: cell(check) for name, check in checks.items()}
    wrong = next((name for name, found in cells.items() if found == "wrong"), "")
    return f"wrong: {wrong}" if wrong else "a tie" if "a tie" in cells.values() else "yes"


def of_own_layers(target: Target, kind: str, prompts: list[list[int]], new: int) -> str:
    """The `cell` of greedy output with a saved drafter out of the target's own layers, `refused` for one line."""
    options = DrafterConfig(kind=kind, layers=2, block_size=BLOCK)  # type: ignore[arg-type]
    with TemporaryDirectory() as folder:
        try:
            if kind == "autoregressive":
                save_causal(make_causal(target, options), Path(folder))
                served = load_target(folder, "float32", "cpu", fast=False)
                drafter: Any = AutoregressiveProposer(served, BLOCK)
            else:
                save_standalone(make_standalone(target, options), Path(folder))
                drafter = DiffusionProposer(load_standalone(folder, target), BLOCK)
        except UserError as error:
            fine = "drafter.kind=" in str(error) or "target" in str(error)
            return "refused" if fine else f"wrong: {error}"
        return cell(same(Plain(Decoder(target), prompts, new, None), Decoder(target, drafter)))
