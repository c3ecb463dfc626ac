"""The global random generators in checkpoints, and separate generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """All random states, as plain values that a weights-only load accepts."""
    name, key, *rest = np.random.get_state()
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(key).astype(np.int64)), *rest],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore the generators from `random_state`."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.cpu().numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


def keyed_generator(*key: int) -> torch.Generator:
    """A generator of the key: the same stream in every process at any time."""
    return torch.Generator().manual_seed(_seed(key))


def seed_global(*key: int) -> None:
    """Seed torch's own generators, which dropout uses, by the key."""
    torch.manual_seed(_seed(key))


def _seed(key: tuple[int, ...]) -> int:
    return int(np.random.default_rng(key).integers(2**62))
