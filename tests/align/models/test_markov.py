"""Markov heads by their definitions."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from align.models.markov import KINDS, MarkovHead, markov_head

D, R, INNER, VD, V = 6, 3, 5, 7, 11
EMBED = torch.randn(V, D, generator=torch.Generator().manual_seed(0))


def embed(tokens: Tensor) -> Tensor:
    return EMBED[tokens]


def head(kind: str) -> MarkovHead:
    made = markov_head(kind, D, R, INNER, VD, V)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return made


DEFINITIONS: dict[str, Callable[..., Tensor]] = {
    "mixed": lambda m, h, x: F.silu(h @ m.hidden.weight.T + embed(x) @ m.previous.weight.T) @ m.out.weight.T,
    "mlp": lambda m, h, x: (
        F.silu(F.silu(h @ m.hidden.weight.T + embed(x) @ m.previous.weight.T) @ m.middle.weight.T)
        @ m.out.weight.T
    ),
    "table": lambda m, h, x: m.table.weight[x],
    "gated": lambda m, h, x: (
        torch.sigmoid(h @ m.hidden.weight.T + m.table.weight[x] @ m.previous.weight.T) * m.table.weight[x]
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_z_and_the_basis(kind: str) -> None:
    made = head(kind)
    hidden, before = (
        torch.randn(2, 4, D, generator=torch.Generator().manual_seed(2)),
        torch.arange(8).view(2, 4),
    )
    z = made(hidden, before, embed)
    torch.testing.assert_close(z, DEFINITIONS[kind](made, hidden, before))
    # what depends on the hidden state alone, computed before; and the last layer in the basis
    mixed = made.mixed(made.inputs(hidden), before, embed)
    torch.testing.assert_close(mixed @ made.basis_Vr(folded=True).T, z @ made.basis)
    assert made.basis_Vr().shape == (VD, R)
    made.silence()
    assert not made(hidden, before, embed).any()


def test_the_inner_width_of_an_mlp_is_twice_the_rank_unless_given() -> None:
    widths = [markov_head("mlp", D, R, inner, VD, V).middle.in_features for inner in (0, INNER)]  # type: ignore[union-attr]
    assert widths == [2 * R, INNER]
