"""Validation rows do not depend on the seed."""

from __future__ import annotations

from pathlib import Path

import torch

from align.config.parser import load_recipe
from align.data.packing import pack, split_validation
from align.data.shards import from_lists
from align.data.stream import Shuffled
from align.training.datamodule import RowsModule


def test_every_seed_is_validated_on_the_same_rows(tmp_path: Path) -> None:
    texts = [torch.randint(4, 200, (12,), generator=torch.Generator().manual_seed(i)) for i in range(40)]
    samples = from_lists(texts, [4] * 40, [0.0, 1.0] * 20)
    found = []
    for seed in (0, 7):
        recipe = load_recipe(["recipe=debug_sedd", f"output={tmp_path}", f"seed={seed}", "data.length=32"])
        training, held_out = split_validation(samples, 0.3)
        rows = RowsModule(recipe, Shuffled(pack(training, 32, seed), seed), held_out, 3, True)
        found.append([row.tokens_L.tolist() for _, row in rows.held_out])
    assert found[0] == found[1] and len(found[0]) > 1
