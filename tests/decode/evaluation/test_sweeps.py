"""Sweeps: the best point, and the comparison with the first one."""

from __future__ import annotations

import pytest

from decode.evaluation.records import Record, Run
from decode.evaluation.summary import Summary, summarise
from decode.evaluation.sweeps import compare_with_first, describe_best
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
    return summarise(Run({"methods": list(speeds), "temperature": 0, "sweep": sweep}, []), records)


def test_the_best_point_is_named() -> None:
    text = describe_best(measured(["gamma=4,8"], SPEEDS))
    assert "lookup:gamma=4, 0.90×" in text and describe_best(measured([], SPEEDS)) == ""


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
    faster, slower = compare_with_first(summarise(run, records), records)
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
    assert compare_with_first(summarise(run, records), records) == []
