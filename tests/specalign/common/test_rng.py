"""Random states survive a weights-only checkpoint; keyed generators belong to their key."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from specalign.common.rng import keyed_generator, random_state, set_random_state


def test_random_states_come_back_from_a_weights_only_file(tmp_path: Path) -> None:
    before = random_state()
    try:
        torch.save(before, tmp_path / "state.pt")
        drawn = [(torch.rand(()).item(), random.gauss(0, 1), np.random.rand()) for _ in range(2)]
        set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
        assert [
            (torch.rand(()).item(), random.gauss(0, 1), np.random.rand()) for _ in range(2)
        ] == drawn
    finally:
        set_random_state(before)


def test_a_keyed_generator_is_the_same_whenever_it_is_asked_for() -> None:
    first, again, other = (
        torch.rand(4, generator=keyed_generator(*key)) for key in ((1, 2), (1, 2), (2, 1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
