"""Plain decoding against the model library's own."""

from __future__ import annotations

import pytest

import decode
from decode.evaluation.session import time_against_transformers
from specalign.lm.model import Target

pytestmark = pytest.mark.usefixtures("no_plots")


def test_plain_decoding_time_against_transformers(target: Target) -> None:
    found = time_against_transformers(
        decode.load(target, None),
        target.chat_tokens("Say one one one."),
        max_new_tokens=8,
        repeats=1,
    )
    assert found["identical"] is True and found["plain_tokens_per_s"] > 0 and found["prompts"] == 1
    assert found["ratio"] == pytest.approx(
        found["plain_tokens_per_s"] / found["transformers_tokens_per_s"]
    )
    assert 10_000 < found["parameters"] < 10**6
    assert found["ratios"] == [pytest.approx(found["ratio"], rel=1e-3)]
    assert time_against_transformers(decode.load(target, None), [])["error"]
