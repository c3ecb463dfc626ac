"""p at every place of a text equals a float64 softmax, whatever the chunk; logits are overwritten, hidden states are not."""

from __future__ import annotations

import pytest
import torch

from align.losses.target_places import target_places


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("chunk", [3, 256])
def test_places_hold_p(temperature: float, chunk: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(7, 5, generator=generator), torch.randn(11, 5, generator=generator)
    following = torch.randint(0, 11, (7,), generator=generator)
    before = hidden.clone()
    places = target_places(hidden, following, lambda h: h @ head.T, temperature, chunk)
    scaled = hidden.double() @ head.double().T / temperature
    torch.testing.assert_close(places.log_z_P.double(), scaled.logsumexp(-1), rtol=1e-5, atol=1e-5)
    chosen = scaled.log_softmax(-1).gather(-1, following[:, None])[:, 0]
    torch.testing.assert_close(places.log_p_next_P.double(), chosen, rtol=1e-5, atol=1e-5)
    assert torch.equal(places.best_P, scaled.argmax(-1)) and torch.equal(places.next_P, following)
    assert places.temperature == temperature and torch.equal(places.hidden_PD, before)
