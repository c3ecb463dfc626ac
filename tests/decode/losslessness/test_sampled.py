"""Sampled texts of a sound engine pass; those of one that takes every draft do not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from align.target.model import Target
from decode.drafters.block import BlockProposer
from decode.engine.decoder import Decoder
from decode.losslessness.cases import VerifyConfig
from decode.losslessness.sampled import SETTINGS, sampled_texts
from decode.speculation import rules
from tests.builders import PROMPT, block_network


@pytest.fixture(scope="module")
def decoder(target: Target) -> Decoder:
    return Decoder(target, BlockProposer(block_network(target, "shared_kv"), tree_nodes=0))


def test_a_sound_engine_passes_under_every_setting(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.losslessness.sampled.LENGTH", 6)
    config = VerifyConfig(samples=2 * len(SETTINGS), max_new_tokens=6)
    check = sampled_texts("block", decoder, [PROMPT], config, 1e-3)
    assert check.passed and check.figures["drafted"] > 0 and check.figures["impossible"] == 0
    assert check.figures["tokens"] >= 2 * len(SETTINGS) * 6 and "least likely" in check.words


def test_a_bug_that_is_planted_while_they_are_drawn_is_seen(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def planted() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(rules, "accept_probability", lambda p, q: torch.ones_like(p).double())
            yield

    config = VerifyConfig(samples=4 * len(SETTINGS), max_new_tokens=6)
    check = sampled_texts("block", decoder, [PROMPT], config, 1e-3, planted)
    assert not check.passed, check.words
