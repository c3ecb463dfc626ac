"""Measuring and checking on a tiny target."""

from __future__ import annotations

import pytest

from align.target.loading import load_target
from decode.advising.observed import PLAIN, Setting
from decode.advising.pair import decoders
from decode.advising.run import Trial, check, held_out, measure


def test_all_is_measured_and_the_points_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode.advising.costs.REPEATS", 1)
    target = load_target("debug")
    made, longest, branches = decoders(target, "debug", "lookup", 3)
    assert (longest, branches) == (3, False)
    trial = Trial(["abcabcabc", "one two"], (0.0, 1.0), 12, longest, [], 300, (1, 2))
    lines: list[str] = []
    costs = measure(target, made, trial, lines.append)
    assert set(costs.settings()) == {Setting(1), Setting(2), Setting(3)} and len(lines) == 5
    assert costs.observed[PLAIN, 0.0].tau == 1 and costs.observed[Setting(3), 0.0].tau >= 1
    points = check(costs, made, trial, lines.append)
    assert len(points) == 5 and all(p.measured > 0 and p.foretold > 0 for p in points)
    assert not {(p.batch, p.temperature) for p in points if p.setting == Setting(3)} & {
        (b, t) for b in (1, 2) for t in (0.0, 1.0)
    }
    assert held_out(costs, trial)[3][2] == 0.5
