"""What several files of training tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from align.config.parser import load_recipe
from align.data import shards as data
from align.data.synthesis import synthesize
from align.target.loading import load_target
from align.target.model import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug")


@pytest.fixture(scope="module")
def samples(target: Target) -> data.Samples:
    """Five texts of random tokens."""
    generator, sizes = torch.Generator().manual_seed(0), (30, 17, 25, 40, 9)
    lists = [torch.randint(4, target.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    return data.from_lists(lists, [5, 4, 6, 3, 2], [1.0] * 5)


@pytest.fixture(scope="session")
def debug_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("debug") / "data"
    synthesize(load_recipe(["recipe=debug_block"]), load_target("debug"), folder, quiet=True)
    return folder
