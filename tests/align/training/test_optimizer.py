"""The rate of a step, and parts with rates of their own."""

from __future__ import annotations

import pytest
import torch

from align.common.errors import UserError
from align.config.recipe import TrainerConfig
from align.training.optimizer import adamw, learning_rate


def test_the_learning_rate_rises_falls_and_stays_at_its_least() -> None:
    t = TrainerConfig(max_steps=110, warmup_steps=10, learning_rate=1.0, min_learning_rate_ratio=0.2)
    assert [learning_rate(t, step, 0.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(t, 60, 0.0) == pytest.approx(0.6)  # half of the cosine
    assert learning_rate(t, 110, 0.0) == learning_rate(t, 500, 0.0) == pytest.approx(0.2)
    t.max_minutes = 1.0  # whichever comes first
    assert learning_rate(t, 20, 30.0) == pytest.approx(0.6) and learning_rate(t, 20, 90.0) == pytest.approx(
        0.2
    )


def test_parts_have_rates_of_their_own() -> None:
    one, two = (torch.nn.Parameter(torch.zeros(1)) for _ in "ab")
    t, trained = TrainerConfig(learning_rates={"markov": 0.1}), {"layers.0.w": one, "markov.basis": two}
    groups = adamw(trained, t).param_groups
    assert [(g["part"], g["params"]) for g in groups] == [("", [one]), ("markov", [two])]
    assert adamw(trained, TrainerConfig()).param_groups[0]["params"] == [one, two]
    with pytest.raises(UserError, match=r"learning_rates\.markov: no such part .*drafter\.markov_rank"):
        adamw({"layers.0.w": one}, t)
