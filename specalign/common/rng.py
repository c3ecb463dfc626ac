"""The global random generators of torch, numpy and Python, as a checkpoint keeps them; and
separate generators."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """All random states, as plain values that a weights-only load accepts."""
    numpy_state = np.random.get_state(legacy=True)
    assert isinstance(numpy_state, tuple)
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(words), gauss],
        "numpy": [
            numpy_state[0],
            torch.from_numpy(numpy_state[1].astype(np.int64)),
            *numpy_state[2:],
        ],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators where `random_state` found them."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, words_t, *rest = state["numpy"]
    np.random.set_state((name, words_t.cpu().numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


def keyed_generator(*key: int) -> torch.Generator:
    """A generator that belongs to the key: the same stream whenever and by whichever process it is
    asked for."""
    return torch.Generator().manual_seed(_seed(key))


def seed_global(*key: int) -> None:
    """Have torch's own generators, of which dropout draws, belong to the key from here on."""
    torch.manual_seed(_seed(key))


def _seed(key: tuple[int, ...]) -> int:
    return int(np.random.default_rng(key).integers(2**62))
