"""Every option of a request is checked by `decode.verify`, and dropping one shows, in the engine and in the reference."""

from __future__ import annotations

import pytest

from decode.engine.decoder import Decoder
from decode.losslessness.dropped import DROPPED
from decode.losslessness.options import Options, drawn_options, same_options
from decode.losslessness.planted import Bug
from decode.methods.build import build
from decode.methods.registry import Parts
from decode.methods.spec import read_method

PROMPT = [30, 31, 5, 6]


@pytest.fixture(scope="module")
def options(shallow_parts: Parts) -> Options:
    return Options(shallow_parts.target, PROMPT, 0)


@pytest.fixture(scope="module")
def both(shallow_parts: Parts) -> list[Decoder]:
    return [build(read_method(f"block:verifier={name}"), shallow_parts) for name in ("auto", "gumbel")]


@pytest.fixture(scope="module")
def by_ratio(shallow_parts: Parts) -> Decoder:
    return build(read_method("block:verifier=token"), shallow_parts)


def test_a_sound_engine_does_as_asked(options: Options, both: list[Decoder], by_ratio: Decoder) -> None:
    for check in (same_options("m", options, *both), drawn_options("m", options, by_ratio)):
        assert check.passed and check.figures["drafted"], check.words


@pytest.mark.slow
@pytest.mark.parametrize("bug", DROPPED, ids=lambda bug: bug.name)
def test_a_dropped_option_shows(bug: Bug, options: Options, both: list[Decoder], by_ratio: Decoder) -> None:
    if bug.check == "options":
        assert not same_options("m", options, *both, bug.planted, bug.setting).passed
    else:
        assert not drawn_options("m", options, by_ratio, bug.planted).passed
