"""The bugs that drop an option; that each of them shows: test_options.py."""

from __future__ import annotations

from dataclasses import fields

from decode.losslessness.dropped import _OFF
from decode.speculation.sampling import Sampling


def test_every_option_of_sampling_is_dropped_once() -> None:
    assert {key for _, off in _OFF.values() for key in off} == {f.name for f in fields(Sampling)}
