"""Methods that differ in one or two options, as a grid: SpecDiff's figure 2 (arXiv 2408.05636) for the user's own pair. No torch."""

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
    """The swept methods of one system: `cells[y][x]` is a method's name, None where it was not measured.

    keys: of the two axes, x first; the second one "" where only one option was swept.
    """

    title: str
    keys: tuple[str, str]
    x: list[str]
    y: list[str]
    cells: list[list[str | None]]


def swept_points(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """System with the options that were not swept → its points, in their order: the swept options of each, as they are
    written → the method's name."""
    keys = list(_swept(summary))
    found: dict[str, dict[str, str]] = {}
    for method in summary["overall"]:
        name, options = _options(method)
        at = " ".join(f"{key}={options.pop(key)}" for key in keys if key in options)
        if at:
            title = written(name, options)
            found.setdefault(title, {})[at] = method
    return found


def _swept(summary: dict[str, Any]) -> dict[str, list[str]]:
    """The options that were swept over more than one value."""
    values = {}
    for word in summary["settings"].get("sweep") or []:
        key, _, text = word.partition("=")
        values[key] = [v for v in text.split(",") if v]
    return {key: found for key, found in values.items() if len(found) > 1}


def _options(method: str) -> tuple[str, dict[str, str]]:
    name, *words = method.split(":")
    return name, dict(word.partition("=")[::2] for word in words)


def grids(summary: dict[str, Any]) -> list[Grid]:
    """One for each system and each value of further options, of the first two options that were swept: what a picture can
    show."""
    values = _swept(summary)
    keys = list(values)[:2]
    by_title: dict[str, dict[tuple[str, str], str]] = {}
    for method in summary["overall"]:
        name, options = _options(method)
        at = [options.pop(key, "") for key in keys]
        if any(at):
            title = written(name, options)
            by_title.setdefault(title, {})[at[0], at[1] if len(at) > 1 else ""] = method
    found = []
    for title, cells in by_title.items():
        x = [v for v in values[keys[0]] if any(a == v for a, _ in cells)] or [""]
        y = [v for v in values[keys[1]] if any(b == v for _, b in cells)] if len(keys) > 1 else []
        rows = [[cells.get((a, b)) for a in x] for b in y or [""]]
        found.append(Grid(title, (keys[0], keys[1] if len(keys) > 1 else ""), x, y or [""], rows))
    return found


def _ablated(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The swept points, of which a race between settings has none that is a result."""
    return {} if summary["settings"].get("race") else swept_points(summary)


def best(summary: dict[str, Any]) -> str:
    """One sentence: the fastest point of each system; "" without one."""
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
    """What each point of each system gains over its first, prompt by prompt: an ablation's figures.

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
    """A figure of the summary over the grid, its value in every cell."""
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
    """Values in rows as a coloured table, the first row on top; a cell that is not a number stays empty."""
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
