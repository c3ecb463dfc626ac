"""The bugs that the self-test plants: each changes the engine while it is planted, and is gone afterwards."""

from __future__ import annotations

import pytest

from decode.losslessness.cases import VerifyConfig
from decode.losslessness.planted import Bug
from decode.losslessness.sampled import sampled_texts
from decode.losslessness.widened import BUGS
from decode.methods.build import build
from decode.methods.registry import Parts
from decode.methods.spec import read_method

SAMPLED = {bug.name: bug for bug in BUGS if bug.check == "sampled"}
CONFIG = VerifyConfig(samples=48)
PROMPTS = [[5, 6, 7, 8], [30, 31]]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_planted_and_taken_out_again(bug: Bug) -> None:
    home, name, _ = bug.plant
    right = getattr(home, name)
    with pytest.raises(KeyError), bug.planted():
        assert getattr(home, name) is not right
        raise KeyError
    assert getattr(home, name) is right


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("the token after a whole draft comes from the row before", "autoregressive:gamma=2"),
        ("p is taken at temperature 1", "block"),
        ("the random numbers begin anew after the prompt", "block"),
        ("the random numbers begin anew after the prompt", "autoregressive:gamma=2:verifier=token"),
        ("p is taken without top-p", "block"),
        ("q is said at half its temperature", "autoregressive:gamma=2:verifier=token"),
    ],
)
def test_a_planted_bug_is_caught_and_its_absence_is_not(name: str, text: str, shallow_parts: Parts) -> None:
    decoder = build(read_method(text), shallow_parts)
    assert sampled_texts("right", decoder, PROMPTS, CONFIG, 1e-3).passed
    assert not sampled_texts("broken", decoder, PROMPTS, CONFIG, 1e-3, SAMPLED[name].planted).passed
