"""The moving average by its formula; the weights themselves come back to the bit."""

from __future__ import annotations

import torch

from align.training.ema import EMA


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
