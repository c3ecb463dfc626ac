"""Every option of a request is checked by `decode.verify`, and what drops one shows, in the engine and in the reference."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from decode.engine import engine
from decode.engine.decoder import Decoder
from decode.losslessness.law import Setting
from decode.losslessness.options import Decoders, batch_options, drawn_options, same_options
from decode.losslessness.planted import Bug
from decode.losslessness.scripted import scripted_check
from decode.losslessness.settings import Options
from decode.losslessness.widened import BUGS
from decode.methods.build import build
from decode.methods.registry import Parts
from decode.methods.spec import read_method

PROMPTS = [[30, 31, 5, 6], [7, 9, 7, 9, 7], [40, 41, 42]]
OWN = [bug for bug in BUGS if bug.check not in ("greedy", "coupled", "sampled", "rounds")]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The debug target's context is shorter than a piece of a long prompt."""
    monkeypatch.setattr(engine, "PREFILL_CHUNK", 128)


@pytest.fixture(scope="module")
def options(shallow_parts: Parts) -> Options:
    return Options(shallow_parts.target, PROMPTS, 0)


@pytest.fixture(scope="module")
def decoders(shallow_parts: Parts) -> Decoders:
    greedy, coupled = (build(read_method(f"block:verifier={v}"), shallow_parts) for v in ("auto", "gumbel"))

    def of(settings: Sequence[Setting]) -> Decoder:
        return greedy if all(s.sampling.greedy for s in settings) else coupled

    return of


@pytest.fixture(scope="module")
def by_ratio(shallow_parts: Parts) -> Decoder:
    return build(read_method("block:verifier=token"), shallow_parts)


def test_a_sound_engine_does_as_asked(options: Options, decoders: Decoders, by_ratio: Decoder) -> None:
    for check in (
        same_options("m", options, decoders, options.exact),
        batch_options("m", options, decoders),
        drawn_options("m", options, by_ratio),
    ):
        assert check.passed and check.figures["drafted"], check.words


@pytest.mark.slow
@pytest.mark.parametrize("bug", OWN, ids=lambda bug: bug.name)
def test_what_drops_an_option_shows(
    bug: Bug, options: Options, decoders: Decoders, by_ratio: Decoder
) -> None:
    if bug.check == "options":
        settings = [s for s in options.exact if s.name == bug.setting]
        check = same_options("m", options, decoders, settings, bug.planted)
    elif bug.check == "options drawn":
        check = drawn_options("m", options, by_ratio, bug.planted)
    else:
        check = scripted_check(options, bug.check.split()[0], bug.setting, bug.planted)
    assert not check.passed, check.words
