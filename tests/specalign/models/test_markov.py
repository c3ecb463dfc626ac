"""Markov heads: silent at the start, and what their formulas say."""

import pytest
import torch
from torch import Tensor

from specalign.models.markov import KINDS, MarkovHead


@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_what_they_say(kind: str) -> None:
    """z by the formulas of the docstrings, and the same bias from the basis that has the last layer multiplied in."""
    generator = torch.Generator().manual_seed(0)
    biased = kind in ("gated", "rnn")  # as another engine's may be
    head = MarkovHead(kind, 16, 4, 9, 12, biased)
    w = dict(head.named_parameters())
    with torch.no_grad():
        for parameter in w.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    embedding = torch.randn(12, 16, generator=generator)
    h, x = torch.randn(5, 16, generator=generator), torch.tensor([0, 3, 11, 3, 7])

    def silu(v: Tensor) -> Tensor:
        return v * v.sigmoid()

    def through(name: str, v: Tensor) -> Tensor:
        return v @ w[f"{name}.weight"].T

    if kind == "linear":
        expected = through("previous", embedding[x])
    elif kind == "vanilla":
        expected = w["table.weight"][x]
    elif biased:
        row = w["table.weight"][x]
        first = through("hidden", h) + w["hidden.bias"] + through("previous", row)
        expected = first.tanh() if kind == "rnn" else first.sigmoid() * row
    else:
        first = through("hidden", h) + through("previous", embedding[x])
        first = first.tanh() if kind == "tanh" else silu(first)
        expected = through("out", first)
    z = head(h, x, lambda tokens: embedding[tokens])
    torch.testing.assert_close(z, expected)
    mixed = head.mix(head.inputs(h), x, lambda tokens: embedding[tokens])
    torch.testing.assert_close(mixed @ head.basis_Vr(folded=True).T, z @ w["basis"])
