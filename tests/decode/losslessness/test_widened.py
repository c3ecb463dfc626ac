"""The bugs of classes that the first checks did not try; that each of them shows: test_options.py, test_planted.py."""

from __future__ import annotations

from decode.losslessness.dropped import DEEPENED, DROPPED
from decode.losslessness.planted import ENGINE_BUGS
from decode.losslessness.widened import BUGS, WIDENED


def test_each_has_a_name_of_its_own_and_all_are_planted() -> None:
    names = [bug.name for bug in BUGS]
    assert len(names) == len(set(names)) and (*ENGINE_BUGS, *DROPPED, *WIDENED, *DEEPENED) == BUGS
