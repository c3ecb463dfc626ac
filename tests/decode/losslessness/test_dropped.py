"""The bugs that drop an option; that each of them shows: test_options.py."""

from __future__ import annotations

from dataclasses import fields

from decode.losslessness.dropped import _OFF, BUGS, DROPPED
from decode.losslessness.planted import ENGINE_BUGS
from decode.speculation.sampling import Sampling


def test_every_option_of_sampling_is_dropped_once() -> None:
    assert {key for _, off in _OFF.values() for key in off} == {f.name for f in fields(Sampling)}


def test_each_has_a_name_of_its_own_and_follows_those_of_the_engine() -> None:
    names = [bug.name for bug in BUGS]
    assert len(names) == len(set(names)) and (*ENGINE_BUGS, *DROPPED) == BUGS
