"""Sweeps: methods that differ in one or more options, as grids (after figure 2 of SpecDiff, arXiv 2408.05636), the best point of each, and
what each point gains over the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes

from decode.reporting.records import Record
from decode.reporting.statistics import counts, paired_ratio, tau_difference, times
from decode.reporting.summary import Gain, Summary, format_estimate, format_method, value_of
from decode.systems.parsing import format_method as join_options


@dataclass(frozen=True)
class Grid:
    """The swept methods of one system: `cells[y][x]` is a method's name, None if it was not measured.

    `keys`: the options of the two axes, x first; the second is "" if only one option was swept.
    """

    title: str
    keys: tuple[str, str]
    x: list[str]
    y: list[str]
    cells: list[list[str | None]]


def _swept(summary: Summary) -> dict[str, list[str]]:
    """The options that were swept over more than one value."""
    values = {}
    for word in summary.settings.get("sweep") or []:
        key, _, text = word.partition("=")
        values[key] = [value for value in text.split(",") if value]
    return {key: found for key, found in values.items() if len(found) > 1}


def _points(summary: Summary, keys: Sequence[str]) -> dict[str, dict[tuple[str, ...], str]]:
    """System with its other options → its points in order: the values of `keys` ("" for an option that it lacks) → the method."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for method in summary.overall:
        name, *words = method.split(":")
        options = dict(word.partition("=")[::2] for word in words)
        point = tuple(options.pop(key, "") for key in keys)
        if any(point):
            found.setdefault(join_options(name, options), {})[point] = method
    return found


def make_grids(summary: Summary) -> list[Grid]:
    """A grid over the first two swept options, which a picture can show, for each system and setting of its other options."""
    values = {**_swept(summary), "": [""]}  # the second axis if one option was swept
    x_key, y_key = list(values)[:2] if len(values) > 1 else ("", "")
    grids = []
    for title, cells in _points(summary, (x_key, y_key)).items():
        x = [value for value in values[x_key] if any(point[0] == value for point in cells)] or [""]
        y = [value for value in values[y_key] if any(point[1] == value for point in cells)] or [""]
        grids.append(Grid(title, (x_key, y_key), x, y, [[cells.get((a, b)) for a in x] for b in y]))
    return grids


def _points_by_name(summary: Summary) -> dict[str, dict[str, str]]:
    """System with its other options → its points: their swept options as typed → the method. Empty for a race."""
    if summary.settings.get("race"):
        return {}
    keys = list(_swept(summary))
    found = {}
    for title, points in _points(summary, keys).items():
        found[title] = {
            " ".join(f"{key}={value}" for key, value in zip(keys, point, strict=True) if value): method
            for point, method in points.items()
        }
    return found


def describe_best(summary: Summary) -> str:
    """A sentence on the fastest point of each swept system; "" without one."""
    sentences = []
    for points in _points_by_name(summary).values():
        speeds = {m: value_of(summary.overall[m].speedup) for m in points.values()}
        known = {method: speed for method, speed in speeds.items() if speed is not None}
        if known:
            method = max(known, key=lambda name: known[name])
            figures = summary.overall[method]
            speed, tau = format_estimate(figures.speedup), value_of(figures.tau)
            sentences.append(
                f"Best of {len(known)} points: {format_method(method, figures)}, {speed}, τ = {tau:.2f}."
            )
    return " ".join(sentences)


def compare_with_first(summary: Summary, records: Sequence[Record]) -> list[Gain]:
    """What each point of each system gains over the first one, prompt by prompt: the figures of an ablation."""
    seed = int(summary.settings.get("seed", 0))
    gains = []
    for title, points in _points_by_name(summary).items():
        (first, base), *others = points.items()
        base_counts, base_times = counts(records, base), times(records, base)
        for point, method in others:
            difference = tau_difference(base_counts, counts(records, method), seed)
            ratio = paired_ratio(base_times, times(records, method), seed)
            prompts = difference.prompts if difference else 0
            gains.append(Gain(title, first, point, method, prompts, difference, ratio))
    return gains


def draw_grid(
    axes: Axes, summary: Summary, grid: Grid, figure: Literal["speedup", "tau"], title: str
) -> None:
    """Draw a figure of the summary over the grid, with its value in every cell."""

    def value(method: str | None) -> float:
        found = None if method is None else value_of(getattr(summary.overall[method], figure))
        return found or float("nan")

    draw_table(axes, [[value(method) for method in row] for row in grid.cells], grid.x, grid.y, 9)
    axes.invert_yaxis()  # small values below
    axes.set_xlabel(grid.keys[0])
    axes.set_ylabel(grid.keys[1])
    axes.set_title(f"{grid.title}: {title}")


def draw_table(
    axes: Axes, values: Sequence[Sequence[float]], x: Sequence[str], y: Sequence[str], fontsize: int
) -> None:
    """Draw values in rows as a coloured table, the first row on top; NaN stays empty."""
    axes.imshow(values, aspect="auto", cmap="viridis")
    numbers = [value for row in values for value in row if value == value]
    low, high = min(numbers, default=0), max(numbers, default=0)
    bright = low + 0.6 * (high - low)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value == value:
                colour = "black" if value > bright else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=fontsize)
    axes.set_xticks(range(len(x)), x)
    axes.set_yticks(range(len(y)), y)
