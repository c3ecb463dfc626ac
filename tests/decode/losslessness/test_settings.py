"""Settings under which dropping a value of an option changes the text: temperatures on both sides of a turn, bonuses that count
within a round."""

from __future__ import annotations

import pytest

from align.target.model import Target
from decode.losslessness.settings import COLD, IN_A_ROUND, LONG_NEW, NEVER, SHORT, Options, _sensitive

PROMPTS = [[30 + i % 7 for i in range(40)], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def options(shallow: Target) -> Options:
    return Options(shallow, PROMPTS, 3)


def test_a_text_turns_between_the_temperatures(options: Options) -> None:
    cold = [s for s in options.exact if s.name.startswith("temperature, ") and s.name != "temperature, seed"]
    assert len(cold) == 2 * len(COLD)
    for below, above in zip(cold[::2], cold[1::2], strict=True):
        assert below.sampling.seed == above.sampling.seed
        assert below.sampling.temperature < above.sampling.temperature < 1.3 * below.sampling.temperature
        assert options.text(below).tokens != options.text(above).tokens


def test_tokens_of_a_round_count(options: Options) -> None:
    bonuses = [s for s in options.exact if s.name.endswith(IN_A_ROUND)]
    assert len(bonuses) == 2
    for setting in bonuses:
        assert _sensitive(options.target, options.prompt, setting, options.text(setting)) > 0


def test_prompts_are_short_but_one(options: Options) -> None:
    assert len(options.prompt) == SHORT and options.prompt == PROMPTS[0][-SHORT:]
    assert all(len(s.prompt) + LONG_NEW == options.target.context_limit for s in options.long)


def test_of_several_values_the_first_and_the_last_do_nothing(options: Options) -> None:
    stops = next(s for s in options.exact if s.name == "stop strings")
    assert stops.stop[0] == NEVER and options.text(stops).finish == "stop"
    ends = next(s for s in options.exact if s.name == "end of text")
    assert ends.ends is not None and options.text(ends).tokens[-1] == ends.ends[1]


def test_one_setting_for_all_and_each_has_the_next_seed(options: Options) -> None:
    first, second, third = (s.sampling.seed for s in options.alike)
    assert (second, third) == (first + 1, first + 2)
    assert {s.name for s in options.together} & {"top-k", "another prompt"}
