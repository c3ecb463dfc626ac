"""Outputs with drafts against those without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from align.target.model import Target
from decode.engine import engine
from decode.engine.decoder import Decoder
from decode.losslessness.compared import Plain, same
from decode.methods.build import build
from decode.methods.registry import Parts
from decode.methods.spec import read_method
from decode.speculation.verification import Outcome, Round

PROMPTS = [[5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 9, 9]]


@pytest.mark.parametrize("seed", [None, 3])
def test_a_sound_engine_gives_the_same_and_a_broken_one_does_not(
    shallow_parts: Parts, seed: int | None
) -> None:
    verifier = "auto" if seed is None else "gumbel"
    plain = Plain(Decoder(shallow_parts.target, None, verifier), PROMPTS, 12, seed)
    other = build(read_method(f"block:verifier={verifier}"), shallow_parts)
    check = same("greedy", "block", plain, other)
    assert check.passed and check.figures["identical"] == 2 and check.figures["drafted"] > 0
    right = engine.verify_rounds

    @contextmanager
    def bug() -> Iterator[None]:
        def wrong(rounds: Sequence[Round]) -> list[Outcome]:
            return [found._replace(following=(found.following + 1) % 200) for found in right(rounds)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "verify_rounds", wrong)
            yield

    broken = same("greedy", "block", plain, other, bug)
    assert not broken.passed and broken.figures["bugs"] > 0 and "bugs (token" in broken.words


def test_where_nothing_is_drafted_nothing_is_shown(shallow: Target) -> None:
    plain = Plain(Decoder(shallow), PROMPTS[:1], 4, None)
    assert same("greedy", "plain", plain, Decoder(shallow)).words.endswith("NOTHING DRAFTED, nothing shown")
    assert plain.output(0) is plain.output(0)  # generated once
