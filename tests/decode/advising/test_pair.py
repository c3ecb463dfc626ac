"""Decoders of one pair."""

from __future__ import annotations

import pytest

from align.common.errors import UserError
from align.target.loading import load_target
from decode.advising.observed import PLAIN, Setting
from decode.advising.pair import decoders


def test_lengths_are_those_of_the_settings() -> None:
    target = load_target("debug")
    made, longest, branches = decoders(target, "debug", "lookup", None)
    assert made(PLAIN).drafter is None and not branches
    assert longest > 1
    first = made(Setting(2))
    assert first.drafter is not None and first.drafter.draft_tokens == 2 and made(Setting(2)) is first


def test_without_a_drafter_one_line_says_what_to_give() -> None:
    with pytest.raises(UserError, match="no drafter is shipped for debug: give --drafter"):
        decoders(load_target("debug"), "debug", None, None)
