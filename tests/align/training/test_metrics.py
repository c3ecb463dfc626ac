"""Validation sums of several processes add up to those of one."""

from __future__ import annotations

import pytest
import torch

from align.training.metrics import ValidationSums


def test_the_sums_of_two_processes_are_those_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    whole, parts = ValidationSums(3), [ValidationSums(3), ValidationSums(3)]
    for part in parts:
        kept = torch.rand(4, 3, generator=generator).sort(-1, descending=True).values
        beta, valid = (
            torch.rand(4, 3, generator=generator),
            torch.rand(4, 3, generator=generator) > 0.3,
        )
        nats, tokens = torch.rand(4, generator=generator), torch.tensor([1.0, 2.0, 3.0, 0.0])
        for sums in (part, whole):
            sums.add_loss(kept.sum(), torch.tensor(4))
            sums.add_accepted("sampling", kept)
            sums.add_positions("sampling", beta, valid)
            sums.add_bound(nats, tokens)
    numbers = whole.numbers(whole.vector())
    assert whole.numbers(parts[0].vector() + parts[1].vector()) == pytest.approx(numbers)
    assert numbers["anchors_sampling"] == 8 and "tau_greedy" not in numbers
    reached = [numbers[f"kept_sampling_{k}"] for k in (1, 2, 3)]
    assert sum(reached) == pytest.approx(numbers["tau_sampling"] - 1)
