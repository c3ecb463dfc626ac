"""Random generators by key."""

import numpy as np
import torch


def keyed_generator(*key: int) -> torch.Generator:
    """A generator of the key: the same stream in every process at any time."""
    return torch.Generator().manual_seed(_seed(key))


def seed_global(*key: int) -> None:
    """Seed torch's own generators, which dropout uses, by the key."""
    torch.manual_seed(_seed(key))


def _seed(key: tuple[int, ...]) -> int:
    return int(np.random.default_rng(key).integers(2**62))
