"""Settings that are found by looking show what they are for: temperatures on both sides of a turn, bonuses that count within a
round, penalties applied twice, stop strings that end together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from align.target.model import Target
from decode.losslessness.law import Setting, write, write_all
from decode.losslessness.searched import COLD, IN_A_ROUND, USUAL, _sensitive
from decode.losslessness.settings import Options

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
        rows: list[Tensor] = []
        asked = [(options.prompt, setting)]
        text = write_all(options.target, asked, lambda _, logits_V, rows=rows: rows.append(logits_V))[0]  # type: ignore[misc]
        assert text.tokens == options.text(setting).tokens and len(rows) == len(text.tokens)
        assert _sensitive(options.prompt, setting, text, rows) > 0


def named(options: Options, name: str) -> Setting:
    return next(s for s in options.exact if s.name == name)


def test_penalties_applied_twice_give_another_text(options: Options) -> None:
    gaps = named(options, "gaps")
    twice = replace(gaps.sampling, repetition_penalty=0.8**2, presence_penalty=-3.0)
    other = write(options.target, options.prompt, replace(gaps, sampling=twice))
    assert other.tokens != options.text(gaps).tokens


def test_a_stop_string_begins_before_the_one_listed_first(options: Options) -> None:
    stops = named(options, "stop strings, one in another")
    whole = write(options.target, options.prompt, replace(stops, stop=())).text
    late, early = (whole.find(stop) for stop in stops.stop)
    assert options.text(stops).text == whole[:early] and early == late - 1


def test_a_banned_token_would_come_once_the_minimum_length_is_reached(options: Options) -> None:
    both = named(options, "banned tokens, minimum length")
    least = both.sampling.min_new_tokens
    allowed = replace(both, sampling=replace(both.sampling, banned=()))
    text = write(options.target, options.prompt, allowed).tokens
    assert text[:least] == options.text(both).tokens[:least] and text[least] in both.sampling.banned


def test_a_usual_value_shows(options: Options) -> None:
    """Beside each value that an engine might take in its place."""
    for name, (own, others) in USUAL.items():
        setting, key = named(options, name), next(iter(own))
        for other in others:
            without = replace(setting, sampling=replace(setting.sampling, **{key: other}))
            text = write(options.target, options.prompt, without)
            assert text.tokens != options.text(setting).tokens, (name, other)


def test_a_wide_top_k_ends_where_it_says(options: Options) -> None:
    """One less, or one more, gives another text, and so does the whole vocabulary."""
    for name, changes in (("top-k, wide", (-1,)), ("top-k, no wider", (1,))):
        setting = named(options, name)
        assert setting.sampling.top_k > 64
        for top_k in (0, *(setting.sampling.top_k + change for change in changes)):
            other = replace(setting, sampling=replace(setting.sampling, top_k=top_k))
            assert write(options.target, options.prompt, other).tokens != options.text(setting).tokens
