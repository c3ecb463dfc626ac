"""Muon for matrices, AdamW for the rest; the learning rate; averaged weights."""

from typing import Any

import pytest
import torch

from align.config.trainer import TrainerConfig
from align.training.optimizer import (
    EMA,
    MuonAdamW,
    group_matrices,
    learning_rate,
    make_optimizer,
    set_rate,
)
from specalign.lm import dtypes


@pytest.mark.parametrize("fast", [True, False])
def test_muon_moves_matrices_adamw_the_rest(fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own two optimizers do apart, also behind a checkpoint; without bf16 products nearly so, its products in fp32."""
    monkeypatch.setattr(dtypes, "has_fast_bf16", lambda device: fast)
    generator = torch.Generator().manual_seed(0)
    shapes = {"layers.0.q.weight": (6, 4), "layers.0.mlp.weight": (3, 8)}
    shapes |= {"layers.0.norm.weight": (4,), "layers.0.self_attn_conv.delta.weight": (2, 4)}
    shapes |= {"markov.basis": (5, 4), "fc.weight": (4, 4)}
    t = TrainerConfig(optimizer="muon", learning_rate=1e-2, weight_decay=0.1)

    def fresh() -> dict[str, torch.nn.Parameter]:
        start = torch.Generator().manual_seed(1)
        made = {name: torch.randn(shape, generator=start) for name, shape in shapes.items()}
        return {name: torch.nn.Parameter(weight) for name, weight in made.items()}

    mine, theirs = fresh(), fresh()
    own = make_optimizer(mine, t)
    set_rate(own, t, t.learning_rate)
    matrices = ["layers.0.q.weight", "layers.0.mlp.weight"]
    options: dict[str, Any] = {"lr": t.muon_learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon([theirs[n] for n in matrices], weight_decay=0.1, **options)
    rest = [p for n, p in theirs.items() if n not in matrices]
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    for step in range(4):
        for name, shape in shapes.items():
            mine[name].grad = torch.randn(shape, generator=generator)
            theirs[name].grad = mine[name].grad.clone()
        own.step()
        muon.step()
        adamw.step()
        for name in shapes:
            exact = fast or name not in matrices
            near = 0.0 if exact else 3e-4
            torch.testing.assert_close(mine[name], theirs[name], rtol=0.0, atol=near)
            assert exact or not torch.equal(mine[name], theirs[name])
        if step == 1:  # a run goes on from what a checkpoint holds
            saved = own.state_dict()
            own = make_optimizer(mine, t)
            own.load_state_dict(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stacked_matrices_move_as_each_alone(dtype: torch.dtype) -> None:
    """Wide and tall ones of one shape together, in stacks that hold two at most; beside a bias for AdamW."""
    shapes = [(6, 4), (4, 6), (6, 4), (3, 5), (4, 6), (5, 5), (5, 5)]
    moved = []
    for numbers in (0, 2 * 25):
        generator = torch.Generator().manual_seed(0)
        matrices = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in shapes]
        rest = torch.nn.Parameter(torch.randn(3, generator=generator))
        groups = [{"params": [rest], "muon": False}, {"params": matrices, "muon": True}]
        optimizer = MuonAdamW(groups, dtype, numbers, lr=0.1, weight_decay=0.1)
        for step in range(3):
            for parameter in (*matrices, rest):
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            if step == 1:
                matrices[2].grad = None
            optimizer.step()
        moved.append([p.detach() for p in (*matrices, rest)])
    close = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(moved[1], moved[0], rtol=0, atol=close)
    sizes = [len(stack) for stack in group_matrices(matrices, 2 * 25)]
    assert sizes == [2, 2, 1, 2] and len(group_matrices(matrices, 0)) == len(shapes)


def test_the_learning_rate_rises_falls_and_stays_at_its_least() -> None:
    t = TrainerConfig(max_steps=110, warmup_steps=10, learning_rate=1.0)
    t.min_learning_rate_ratio = 0.2
    assert [learning_rate(t, step, 0.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(t, 60, 0.0) == pytest.approx(0.6)  # half of the cosine
    assert learning_rate(t, 110, 0.0) == learning_rate(t, 500, 0.0) == pytest.approx(0.2)
    t.max_minutes = 1.0  # whichever comes first
    rates = [learning_rate(t, 20, seconds) for seconds in (30.0, 90.0)]
    assert rates == [pytest.approx(0.6), pytest.approx(0.2)]


def test_the_average_follows_its_formula_and_gives_the_weights_back() -> None:
    module = torch.nn.Linear(3, 2, bias=False)
    ema, expected = EMA(module, 0.5), module.weight.detach().clone()
    for step in range(8):
        with torch.no_grad():
            module.weight.add_(step + 1)
        d = min(0.5, (1 + step) / (10 + step))
        expected = d * expected + (1 - d) * module.weight.detach()
        ema.update(module)
    own = module.weight.detach().clone()
    ema.swap_in(module)
    torch.testing.assert_close(module.weight.detach(), expected)
    torch.testing.assert_close(ema.weights(module)["weight"], expected)
    ema.swap_out(module)
    assert torch.equal(module.weight.detach(), own)
    again = EMA(module, 0.5)
    again.load_state_dict(ema.state_dict())
    assert again.updates == 8 and torch.equal(again.shadow["weight"], ema.shadow["weight"])
