"""The exact distribution by enumeration, and the statistics of the test."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from decode.speculation.sampling import Sampling
from specalign.lm.loading import load_target
from tests.exact_distribution import chi_square, chi_square_tail, exact_law
from tests.fakes import TableTarget


def test_the_exact_law(monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableTarget(4, seed=2)
    target = load_target("debug", dtype="float32", device="cpu")
    target.eos_ids = ()
    sampling, prompt = Sampling(1.0, top_k=2), [5, 6, 7]
    law = exact_law(target, prompt, 3, sampling)
    assert len(law) == 8 and sum(law.values()) == pytest.approx(1.0)
    for text, mass in law.items():
        expected, prefix = 1.0, list(prompt)
        for token in text:
            logits = target.forward(torch.tensor([prefix])).logits_BLV
            assert logits is not None
            pair = logits[0, -1].double().topk(2)
            expected *= float(pair.values.softmax(0)[pair.indices.tolist().index(token)])
            prefix.append(token)
        assert mass == pytest.approx(expected, rel=1e-4)
    assert table.law([0], 2, Sampling(1.0))  # the toy's own, walked in another way


def test_the_statistics() -> None:
    assert chi_square_tail(3.841459, 1) == pytest.approx(0.05, abs=1e-5)
    assert chi_square_tail(29.588, 10) == pytest.approx(0.001, abs=1e-5)
    found, law = Counter({(0,): 60, (1,): 38, (2,): 2}), {(0,): 0.6, (1,): 0.37, (2,): 0.03}
    assert chi_square(found, law, 100) == (0.0, 1)  # the rare one is counted with the next
