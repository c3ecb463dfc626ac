"""Settings under which dropping a value of an option changes the text."""

from __future__ import annotations

import pytest

from align.target.model import Target
from decode.losslessness.searched import AT_LEAST, AT_LENGTH, DEEP
from decode.losslessness.settings import NEVER, SHORT, Options

PROMPTS = [[30 + i % 7 for i in range(40)], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def options(shallow: Target) -> Options:
    return Options(shallow, PROMPTS, 3)


def test_prompts_are_short_but_one(options: Options) -> None:
    assert len(options.prompt) == SHORT and options.prompt == PROMPTS[0][-SHORT:]
    assert [len(s.prompt) + s.new for s in options.long] == 3 * [options.target.context_limit]


def test_of_several_values_the_first_and_the_last_do_nothing(options: Options) -> None:
    stops = next(s for s in options.exact if s.name == "stop strings")
    assert stops.stop[0] == NEVER and options.text(stops).finish == "stop"
    ends = next(s for s in options.exact if s.name == "end of text")
    assert ends.ends is not None and options.text(ends).tokens[-1] == ends.ends[1]


def test_a_text_is_long_enough_for_long_drafts_and_a_minimum_length(options: Options) -> None:
    greedy, drawn = (options.text(s) for s in options.exact if s.drafts == DEEP)
    assert len(greedy.tokens) == AT_LENGTH and AT_LEAST <= len(drawn.tokens) <= AT_LENGTH


def test_one_setting_for_all_and_each_has_the_next_seed(options: Options) -> None:
    first, second, third = (s.sampling.seed for s in options.alike)
    assert (second, third) == (first + 1, first + 2)
    assert {s.name for s in options.together} & {"top-k", "another prompt"}
