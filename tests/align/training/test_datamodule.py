"""Training steps: their rows, anchors and used places; validation rows do not depend on the seed."""

import multiprocessing
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from align.config.parser import load_recipe
from align.data.packing import RowStream, pack, split_validation
from align.training.block_module import BlockDrafterModule
from align.training.datamodule import RowsModule
from specalign.common.batch import Anchors, Step, UsedPlaces
from specalign.lm.model import Target
from specalign.rows.shards import Samples, ShardSamples, from_lists
from tests.builders import trained_block


def test_every_seed_is_validated_on_the_same_rows(tmp_path: Path) -> None:
    texts = torch.randint(4, 200, (40, 12), generator=torch.Generator().manual_seed(0))
    samples = ShardSamples.of([from_lists([*texts], [4] * 40, [0.0, 1.0] * 20)])
    found = []
    for seed in (0, 7):
        words = ["recipe=debug_sedd", f"output={tmp_path}", f"seed={seed}", "data.length=32"]
        recipe = load_recipe(words)
        training, held_out = split_validation(samples, 0.3)
        rows = RowsModule(recipe, RowStream(pack(training, 32, seed), seed), held_out, 3, True)
        found.append([row.tokens_L.tolist() for _, row in rows.held_out])
    assert found[0] == found[1] and len(found[0]) > 1


def test_two_processes_draw_what_one_draws(tmp_path: Path) -> None:
    """Standalone drafters' noise goes by the width of a micro-batch: rows of few anchors beside rows of many."""
    texts = [torch.arange(4, 4 + size) for size in (9, 30, 12, 30)]
    samples = from_lists(texts, [5] * 4, [1.0] * 4)
    words = ["recipe=debug_sedd", f"output={tmp_path}", "data.length=32", "trainer.batch_size=2"]
    stream = RowStream(pack(samples, 32, 0), 0)
    module = RowsModule(load_recipe(words), stream, ShardSamples.of([samples]), 3, True)
    widths = set()
    for micro in range(4):
        together = module.step(micro)
        for rank in range(2):
            step = module.step(micro, rank, 2)
            widths.add(int(step.anchors.valid_BAK[0, :, 0].sum()))
            assert torch.equal(step.anchors.valid_BAK[0], together.anchors.valid_BAK[rank])
            assert torch.equal(step.anchors.index_BA[0], together.anchors.index_BA[rank])
    assert len(widths) > 1


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize("fixed", [False, True])
def test_used_places_are_those_of_valid_positions(share: float, fixed: bool) -> None:
    generator = torch.Generator().manual_seed(int(10 * share))
    rows, count, size, length = 3, 7, 4, 20
    index_BA = torch.rand(rows, length, generator=generator).topk(count).indices.sort(1).values
    valid_BAK = torch.rand(rows, count, size, generator=generator) < share
    anchors = Anchors(index_BA, valid_BAK)
    used = UsedPlaces.find(anchors, length, fixed)
    flat_BAK = anchors.places_BAK(length) + torch.arange(rows)[:, None, None] * length
    assert torch.equal(used.flat_P[used.index_BAK][valid_BAK], flat_BAK[valid_BAK])
    assert used.host_R.tolist() == used.index_BAK.flatten().tolist()
    distinct = max(len(flat_BAK[valid_BAK].unique()), 1)
    part = -(-rows * length // 8)
    assert len(used.flat_P) == (-(-distinct // part) * part if fixed else distinct)
    assert len(used.flat_P.unique()) == distinct and bool((used.flat_P.diff() >= 0).all())


@pytest.fixture
def rows_module(tmp_path: Path, samples: Samples) -> RowsModule:
    """With prefixes, and kept outputs."""
    words = ["trainer.batch_size=2", "trainer.anchors=12", "trainer.keep_features_gb=1"]
    words += ["data.length=48", "objective.prefix_decay=0.9", "trainer.max_steps=4"]
    recipe = load_recipe(["recipe=debug_block", f"output={tmp_path}", *words])
    stream = RowStream(pack(samples, 48, 0), 0)
    return RowsModule(recipe, stream, ShardSamples.of([samples]), 4, True)


def test_fixed_shapes_keep_loss(target: Target, samples: Samples, rows_module: RowsModule) -> None:
    """Anchors without valid positions and repeated places count for nothing."""
    module = BlockDrafterModule(trained_block(target, samples), rows_module.recipe)
    module.target_cache = None
    shapes = set()
    for micro in range(4):
        losses = []
        for fixed in (False, True):
            step = rows_module.step(micro, fixed=fixed)
            found, valid, _ = module.draft_statistics(step)
            module.zero_grad()
            loss = module.objective.per_position(found, valid).sum() * step.scale
            loss.backward()
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            losses.append([loss.detach(), *(g.clone() for g in gradients)])
            if fixed:
                shapes.add(tuple(step.anchors.valid_BAK.shape))
                assert len(step.used.flat_P) % 12 == 0
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-6)
    assert shapes == {(2, 12, 4)}


def test_a_worker_prepares_the_same_steps(rows_module: RowsModule) -> None:
    """As on a GPU; without one nothing is pinned. A signal to all processes does not end it."""
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer: Any = SimpleNamespace(global_rank=0, world_size=1, strategy=strategy)
    rows_module.trainer = trainer
    rows_module.start = 1
    loader = iter(rows_module.train_dataloader())
    found = [next(loader)]
    (worker,) = multiprocessing.active_children()
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid or 0, number)
    found += loader
    for micro, step in enumerate(found, 1):
        wanted = rows_module.step(micro, fixed=True)
        assert all(map(torch.equal, tensors_of(step), tensors_of(wanted)))
        assert (step.scale, step.keys, step.places) == (wanted.scale, wanted.keys, wanted.places)
        assert step.digests == wanted.digests and (step.used.host_R == wanted.used.host_R).all()
    assert micro == 3


def tensors_of(step: Step) -> list[torch.Tensor]:
    parts = (step, step.batch, step.anchors, step.used)
    return [x for part in parts for x in vars(part).values() if isinstance(x, torch.Tensor)]
