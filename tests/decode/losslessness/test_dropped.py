"""The bugs that drop an option; that each of them shows: test_options.py."""

from __future__ import annotations

from dataclasses import fields

from decode.losslessness.dropped import _OFF, DEEPENED, LATE
from decode.losslessness.law import DRAFTED
from decode.losslessness.searched import AT_LENGTH, DEEP
from decode.speculation.sampling import Sampling


def test_every_option_of_sampling_is_dropped_once() -> None:
    assert {key for _, off in _OFF.values() for key in off} == {f.name for f in fields(Sampling)}


def test_what_begins_late_begins_behind_the_usual_drafts_and_within_the_long_ones() -> None:
    assert DRAFTED <= LATE < DEEP < AT_LENGTH
    assert {bug.setting for bug in DEEPENED} >= {"at length", "at length, seed", "after an interruption"}
