"""Gradients are off within, and as they were outside, also after an error."""

from __future__ import annotations

import pytest
import torch

from specalign.kernels.gradients import without_gradients


@without_gradients
def squared(x: torch.Tensor, fails: bool = False) -> torch.Tensor:
    """A name of its own."""
    assert not torch.is_grad_enabled()
    if fails:
        raise KeyError
    return x * x


@pytest.mark.parametrize("on", [True, False])
def test_gradients_are_off_within_alone(on: bool) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.set_grad_enabled(on):
        assert not squared(x).requires_grad and torch.is_grad_enabled() == on
        with pytest.raises(KeyError):
            squared(x, fails=True)
        assert torch.is_grad_enabled() == on
    assert squared.__name__ == "squared" and squared.__doc__ == "A name of its own."
