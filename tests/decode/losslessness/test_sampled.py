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
from decode.losslessness.sampled import SETTINGS, in_words, sampled_texts
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


def test_its_words() -> None:
    figures = {
        "drafted": 0, "accepted": 0, "tokens": 70, "whole": 0, "impossible": 0, "repeated": 0, "worst": ["rank", "all"],
        "p": 0.03, "sees": 0.21, "sees_whole": None,
    }  # fmt: skip
    plain = "70 tokens; least likely: 'rank' of all tokens, p 0.03; sees a shift of 0.21 per token"
    assert in_words(figures, drafts=False) == plain
    shift = "; sees a shift"
    assert in_words(figures, drafts=True) == plain.replace(shift, "; NOTHING DRAFTED, nothing shown" + shift)
    figures |= {"drafted": 9, "accepted": 4, "whole": 3, "impossible": 2, "repeated": 1, "sees_whole": 0.5}
    said = in_words(figures, drafts=True)
    assert "; 2 of them have no probability under the target; 1 round drawn with random numbers of" in said
    assert said.endswith(
        "4 of 9 drafts accepted; sees a shift of 0.21 per token; one of 0.50 after a whole draft (3 tokens)"
    )
    assert in_words(figures | {"sees_whole": None}, True).endswith("; none after a whole draft (3 tokens)")
