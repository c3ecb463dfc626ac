"""Fixtures of the tests of training and of the shared package."""

import pytest
import torch

from specalign.lm.loading import load_target
from specalign.lm.model import Target
from specalign.rows import shards as data


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target("debug")


@pytest.fixture(scope="module")
def samples(target: Target) -> data.Samples:
    """Five texts of random tokens."""
    generator, sizes = torch.Generator().manual_seed(0), (30, 17, 25, 40, 9)
    lists = [torch.randint(4, target.vocab_size, (n,), generator=generator).tolist() for n in sizes]
    return data.from_lists(lists, [5, 4, 6, 3, 2], [1.0] * 5)
