"""Sweeps as grids: which methods stand where, the best point, the picture."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from decode.sweeps import Grid, best, grids, heat


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


def test_the_best_point_is_named() -> None:
    text = best(summary(["gamma=4,8", "steps=1,2"], SPEEDS))
    assert "Best of 3 points: specdiff:order=random:gamma=8:steps=1, 1.30×" in text
    assert "lookup:gamma=4, 0.90×" in text and best(summary([], SPEEDS)) == ""


def test_the_picture_says_the_values() -> None:
    made = summary(["gamma=4,8", "steps=1,2"], SPEEDS)
    axes = Figure().subplots()
    heat(axes, made, grids(made)[0], "speedup", "speed-up")
    assert sorted(t.get_text() for t in axes.texts) == ["1.10", "1.20", "1.30"]
    assert axes.get_xlabel() == "gamma" and axes.get_ylabel() == "steps"
