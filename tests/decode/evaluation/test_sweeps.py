"""Sweeps: the best point, and the comparison with the first one."""

from __future__ import annotations

import pytest

from decode.evaluation.records import Record, Run
from decode.evaluation.summary import Summary, summarise
from decode.evaluation.verdict import verdict
from tests.measurements import record

SPEEDS = {"plain": 1.0, "lookup": 1.4, "lookup:gamma=4": 0.9, "lookup:gamma=8": None}


def measured(sweep: list[str], speeds: dict[str, float | None]) -> Summary:
    """Two prompts per method; a speed of None: nothing was decoded."""
    records = [
        record(method, prompt, 1 / speed, 10)
        if speed
        else record(method, prompt, committed=0, calls=0)
        for method, speed in speeds.items()
        for prompt in "ab"
    ]
    settings = {"temperature": 0, "max_new_tokens": 10, "dtype": "float32", "sweep": sweep}
    return summarise(Run({"methods": list(speeds), **settings}, []), records)


def test_the_best_point_is_named() -> None:
    text = verdict(measured(["gamma=4,8"], SPEEDS))
    assert "Best of 1 points: lookup:gamma=4, 0.90×" in text
    assert "Best of" not in verdict(measured([], SPEEDS))


def test_every_point_is_compared_with_the_first_prompt_by_prompt() -> None:
    points = {
        "a:gamma=4": (1.0, 10),
        "a:gamma=8": (0.5, 8),
        "a:gamma=16": (2.0, 5),
        "b:gamma=4": (1.0, 9),
    }
    records: list[Record] = [
        record(method, prompt, seconds * slow, 20, calls + i)
        for i, (prompt, slow) in enumerate([("x", 1.0), ("y", 3.0), ("z", 9.0)])
        for method, (seconds, calls) in points.items()
        if (method, prompt) != ("a:gamma=16", "z")  # the run was interrupted
    ]
    run = Run({"methods": list(points), "temperature": 0, "sweep": ["gamma=4,8,16"]}, [])
    faster, slower = summarise(run, records).against_first
    assert (faster.first, faster.point, faster.prompts) == ("gamma=4", "gamma=8", 3)
    assert faster.tau is not None and faster.tau.value == pytest.approx(60 / 27 - 60 / 33)
    # the prompts' own speeds differ ninefold, their ratio does not
    assert faster.speed is not None
    assert [faster.speed.value, faster.speed.lo, faster.speed.hi] == pytest.approx([2.0] * 3)
    assert slower.speed is not None and slower.tau is not None
    assert (slower.method, slower.prompts, slower.speed.value) == ("a:gamma=16", 2, 0.5)
    ends = [20 / 6 - 20 / 11, 40 / 11 - 40 / 21, 4 - 2]
    assert [slower.tau.lo, slower.tau.value, slower.tau.hi] == pytest.approx(ends)
    run.settings["tuning"] = 1
    assert summarise(run, records).against_first == []
