"""Validation rows do not depend on the seed."""

from __future__ import annotations

from pathlib import Path

import torch

from align.config.parser import load_recipe
from align.data.packing import pack, split_validation
from align.data.stream import Shuffled
from align.training.datamodule import RowsModule
from specalign.rows.shards import ShardSamples, from_lists


def test_every_seed_is_validated_on_the_same_rows(tmp_path: Path) -> None:
    texts = [
        torch.randint(4, 200, (12,), generator=torch.Generator().manual_seed(i)) for i in range(40)
    ]
    samples = ShardSamples.of([from_lists(texts, [4] * 40, [0.0, 1.0] * 20)])
    found = []
    for seed in (0, 7):
        recipe = load_recipe(
            ["recipe=debug_sedd", f"output={tmp_path}", f"seed={seed}", "data.length=32"]
        )
        training, held_out = split_validation(samples, 0.3)
        rows = RowsModule(recipe, Shuffled(pack(training, 32, seed), seed), held_out, 3, True)
        found.append([row.tokens_L.tolist() for _, row in rows.held_out])
    assert found[0] == found[1] and len(found[0]) > 1


def test_two_processes_draw_what_one_draws(tmp_path: Path) -> None:
    """Standalone drafters' noise goes by the width of a micro-batch: rows of few anchors beside rows of many."""
    texts = [torch.arange(4, 4 + size) for size in (9, 30, 12, 30)]
    rows = pack(from_lists(texts, [5] * 4, [1.0] * 4), 32, 0)
    recipe = load_recipe(
        ["recipe=debug_sedd", f"output={tmp_path}", "data.length=32", "trainer.batch_size=2"]
    )
    stream = Shuffled(rows, 0)
    module = RowsModule(
        recipe, stream, ShardSamples.of([from_lists(texts, [5] * 4, [1.0] * 4)]), 3, True
    )
    widths = set()
    for micro in range(4):
        together = module.step(micro)
        for rank in range(2):
            step = module.step(micro, rank, 2)
            widths.add(int(step.anchors.valid_BAK[0, :, 0].sum()))
            assert torch.equal(step.anchors.valid_BAK[0], together.anchors.valid_BAK[rank])
            assert torch.equal(step.anchors.index_BA[0], together.anchors.index_BA[rank])
    assert len(widths) > 1
