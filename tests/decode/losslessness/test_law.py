"""The second writing of p against the engine's own: equal where the engine is right."""

from __future__ import annotations

import pytest
import torch

from align.target.model import Target
from decode.losslessness.law import law, noise, scores
from decode.speculation.processors import History
from decode.speculation.sampling import Sampling, position_noise, probs
from decode.speculation.tree import chain

PROMPT, TOKENS = [5, 6, 7], [9, 5, 9, 11, 3]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.3, 0.9, 0, 1.7, 0, 0.0, 0.4, (3, 4), 3),
        Sampling(0.7, top_k=5),
        Sampling(2.0, min_p=0.3),
        Sampling(1.0, 0.8, 20, 1.2, 0, 0.05, -0.7, (1,), 2),
    ],
    ids=["penalties", "top-k", "min-p", "everything"],
)
def test_p_is_the_engines(sampling: Sampling, target: Target) -> None:
    history = History(sampling, PROMPT, target.vocab_size, target.eos_ids, target.device)
    logits_LV = 3 * torch.randn(
        5, target.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    expected = probs(logits_LV, sampling, history.rows(torch.tensor(TOKENS[:-1]), chain(4)))
    found = law(scores(logits_LV, PROMPT, TOKENS, sampling, target.eos_ids), sampling)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


def test_the_noise_is_the_engines() -> None:
    assert torch.equal(noise(3, 17, 50, torch.device("cpu")), position_noise(3, 17, 50, torch.device("cpu")))
