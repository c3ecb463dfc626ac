"""Sweeps as grids: which methods stand where, the best point, the picture."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from matplotlib.figure import Figure

from decode.reporting.sweeps import Grid, against_first, best, grids, heat
from tests.measurements import record


def summary(sweep: list[str], speeds: dict[str, float | None]) -> dict[str, Any]:
    overall = {
        name: {
            "speedup": speed,
            "speedup_lo": speed,
            "speedup_hi": speed,
            "tau": 1.5,
            "lossy": False,
            "verifier": "greedy",
        }
        for name, speed in speeds.items()
    }
    return {"settings": {"sweep": sweep}, "overall": overall}


SPEEDS = {
    "plain": 1.0,
    "lookup": 1.4,
    "specdiff:order=random:gamma=4:steps=1": 1.1,
    "specdiff:order=random:gamma=4:steps=2": 1.2,
    "specdiff:order=random:gamma=8:steps=1": 1.3,
    "specdiff:order=random:gamma=8:steps=2": None,
    "lookup:gamma=4": 0.9,
    "lookup:gamma=8": 0.8,
}


def test_each_system_has_its_grid() -> None:
    found = grids(summary(["gamma=4,8", "steps=1,2"], SPEEDS))
    assert [g.title for g in found] == ["specdiff:order=random", "lookup"]
    assert found[0].cells == [
        ["specdiff:order=random:gamma=4:steps=1", "specdiff:order=random:gamma=8:steps=1"],
        ["specdiff:order=random:gamma=4:steps=2", "specdiff:order=random:gamma=8:steps=2"],
    ]
    assert found[1] == Grid(
        "lookup", ("gamma", "steps"), ["4", "8"], [""], [["lookup:gamma=4", "lookup:gamma=8"]]
    )
    assert grids(summary([], SPEEDS)) == [] and grids({**summary([], SPEEDS), "settings": {}}) == []
    assert grids(summary(["gamma=4"], SPEEDS)) == []  # one value is no axis


def test_three_options_are_one_sweep() -> None:
    """A picture has two axes; the best point and the ablation are of all points."""
    speeds = {"plain": 1.0}
    for i, (start, steps, gamma) in enumerate(product(("false", "true"), (1, 2), (4, 8))):
        speeds[f"specdiff:gamma={gamma}:steps={steps}:hot_start={start}"] = 1.1 + i / 10
    made = summary(["gamma=4,8", "steps=1,2", "hot_start=false,true"], speeds)
    assert len(grids(made)) == 2 and best(made).count("Best of") == 1
    assert "Best of 8 points: specdiff:gamma=8:steps=2:hot_start=true, 1.80×" in best(made)
    records = [record("a", name, 1.0, 10) for name in speeds]
    gained = against_first(made, records)
    assert len(gained) == 7 and {g["first"] for g in gained} == {"gamma=4 steps=1 hot_start=false"}
    assert "gamma=4 steps=1 hot_start=true" in {g["point"] for g in gained}


def test_the_best_point_is_named() -> None:
    text = best(summary(["gamma=4,8", "steps=1,2"], SPEEDS))
    assert "Best of 3 points: specdiff:order=random:gamma=8:steps=1, 1.30×" in text
    assert "lookup:gamma=4, 0.90×" in text and best(summary([], SPEEDS)) == ""


def test_every_point_is_held_against_the_first_prompt_by_prompt() -> None:
    points = {"a:gamma=4": (1.0, 10), "a:gamma=8": (0.5, 8), "a:gamma=16": (2.0, 5), "b:gamma=4": (1.0, 9)}
    records = [
        record(method, prompt, seconds * slow, 20, calls + i)
        for i, (prompt, slow) in enumerate([("x", 1.0), ("y", 3.0), ("z", 9.0)])
        for method, (seconds, calls) in points.items()
        if (method, prompt) != ("a:gamma=16", "z")  # the run stopped there
    ]
    made = summary(["gamma=4,8,16"], dict.fromkeys(points, 1.0))
    faster, slower = against_first(made, records)
    assert faster["system"] == "a" and faster["first"] == "gamma=4" and faster["point"] == "gamma=8"
    assert faster["tau"] == pytest.approx(60 / 27 - 60 / 33) and faster["prompts"] == 3
    # the prompts' own speeds differ ninefold, their ratio does not
    assert [faster[f"speed{end}"] for end in ("", "_lo", "_hi")] == pytest.approx([2.0] * 3)
    assert slower["method"] == "a:gamma=16" and slower["prompts"] == 2 and slower["speed"] == 0.5
    assert slower["tau"] == pytest.approx(40 / 11 - 40 / 21)
    assert slower["tau_lo"] == pytest.approx(20 / 6 - 20 / 11) and slower["tau_hi"] == pytest.approx(4 - 2)
    assert against_first({**made, "settings": {**made["settings"], "race": 1}}, records) == []


def test_the_picture_says_the_values() -> None:
    made = summary(["gamma=4,8", "steps=1,2"], SPEEDS)
    axes = Figure().subplots()
    heat(axes, made, grids(made)[0], "speedup", "speed-up")
    assert sorted(t.get_text() for t in axes.texts) == ["1.10", "1.20", "1.30"]
    assert axes.get_xlabel() == "gamma" and axes.get_ylabel() == "steps"
