"""Sweeps: methods that differ in one or more options, as grids (after figure 2 of SpecDiff, arXiv 2408.05636), the best point of
each, and what each point gains over the first. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from decode.method_names import written
from decode.reporting.records import Record
from decode.reporting.statistics import counts, paired_ratio, tau_difference, times
from decode.reporting.summary import interval, named, spread


@dataclass(frozen=True)
class Grid:
    """The swept methods of one system: `cells[y][x]` is a method's name, None where none was measured.

    keys: the options of the two axes, x first; the second one "" where only one option was swept.
    """

    title: str
    keys: tuple[str, str]
    x: list[str]
    y: list[str]
    cells: list[list[str | None]]


def _swept(summary: dict[str, Any]) -> dict[str, list[str]]:
    """The options that were swept over more than one value."""
    values = {}
    for word in summary["settings"].get("sweep") or []:
        key, _, text = word.partition("=")
        values[key] = [v for v in text.split(",") if v]
    return {key: found for key, found in values.items() if len(found) > 1}


def _points(summary: dict[str, Any], keys: Sequence[str]) -> dict[str, dict[tuple[str, ...], str]]:
    """System with its other options → its points, in their order: the values of `keys` ("" where it has no such option) → the
    method's name. Methods with none of these options are left out."""
    found: dict[str, dict[tuple[str, ...], str]] = {}
    for method in summary["overall"]:
        name, *words = method.split(":")
        options = dict(word.partition("=")[::2] for word in words)
        at = tuple(options.pop(key, "") for key in keys)
        if any(at):
            found.setdefault(written(name, options), {})[at] = method
    return found


def grids(summary: dict[str, Any]) -> list[Grid]:
    """A grid over the first two swept options, as many as a picture can show, for each system and each setting of its other
    options."""
    values = {**_swept(summary), "": [""]}  # where one option was swept, this is the other axis
    x_key, y_key = list(values)[:2] if len(values) > 1 else ("", "")
    found = []
    for title, cells in _points(summary, (x_key, y_key)).items():
        x = [v for v in values[x_key] if any(at[0] == v for at in cells)] or [""]
        y = [v for v in values[y_key] if any(at[1] == v for at in cells)] or [""]
        found.append(Grid(title, (x_key, y_key), x, y, [[cells.get((a, b)) for a in x] for b in y]))
    return found


def _ablated(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """System with the options that were not swept → the swept options of each point, as they are written → the method's name.
    A race between settings has no points that are results."""
    if summary["settings"].get("race"):
        return {}
    keys, found = list(_swept(summary)), {}
    for title, points in _points(summary, keys).items():
        found[title] = {
            " ".join(f"{key}={value}" for key, value in zip(keys, at, strict=True) if value): method
            for at, method in points.items()
        }
    return found


def best(summary: dict[str, Any]) -> str:
    """A sentence for each swept system: its fastest point; "" without one."""
    sentences = []
    for points in _ablated(summary).values():
        names = [m for m in points.values() if summary["overall"][m]["speedup"] is not None]
        if names:
            method = max(names, key=lambda m: summary["overall"][m]["speedup"])
            figures = summary["overall"][method]
            sentences.append(
                f"Best of {len(names)} points: {named(method, figures)}, {interval(figures)}, τ = {figures['tau']:.2f}."
            )
    return " ".join(sentences)


def against_first(summary: dict[str, Any], records: Sequence[Record]) -> list[dict[str, Any]]:
    """What each point of each system gains over the first one, prompt by prompt: the figures of an ablation.

    Each has `system`, `first` and `point` (the swept options of both), `method`, `prompts`, and with intervals `tau` (difference) and
    `speed` (ratio, above 1 where it is faster than the first).
    """
    seed, found = int(summary["settings"].get("seed", 0)), []
    for title, points in _ablated(summary).items():
        (first, base), *others = points.items()
        base_counts, base_times = counts(records, base), times(records, base)
        for point, method in others:
            gained = tau_difference(base_counts, counts(records, method), seed)
            found.append(
                {
                    "system": title,
                    "first": first,
                    "point": point,
                    "method": method,
                    "prompts": gained.prompts if gained else 0,
                    **spread("tau", gained),
                    **spread("speed", paired_ratio(base_times, times(records, method), seed)),
                }
            )
    return found


def heat(axes: Axes, summary: dict[str, Any], grid: Grid, figure: str, title: str) -> None:
    """Draw a figure of the summary over the grid, with its value in every cell."""
    values = [
        [float("nan") if m is None else summary["overall"][m][figure] or float("nan") for m in row]
        for row in grid.cells
    ]
    coloured(axes, values, grid.x, grid.y, 9)
    axes.invert_yaxis()  # small values below
    axes.set_xlabel(grid.keys[0])
    axes.set_ylabel(grid.keys[1])
    axes.set_title(f"{grid.title}: {title}")


def coloured(
    axes: Axes, values: Sequence[Sequence[float]], x: Sequence[str], y: Sequence[str], fontsize: int
) -> None:
    """Draw values in rows as a coloured table, the first row on top; a cell that is not a number stays empty."""
    axes.imshow(values, aspect="auto", cmap="viridis")
    numbers = [value for row in values for value in row if value == value]
    bright = min(numbers, default=0) + 0.6 * (max(numbers, default=0) - min(numbers, default=0))
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value == value:
                colour = "black" if value > bright else "white"
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=fontsize)
    axes.set_xticks(range(len(x)), x)
    axes.set_yticks(range(len(y)), y)
