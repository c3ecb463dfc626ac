"""τ over the text tokens that drafters were trained on: one table and one picture for several
recipes.

The figures and their intervals are those of decode/evaluation/statistics.py: over prompts, each
drawn with all its counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure

from decode.evaluation.figures import COLOURS, error_bar, literal_text, set_log_axis, to_png
from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate, accepted_ratio, counts, tau
from decode.evaluation.summary import format_estimate
from specalign.common.text import markdown_table


@dataclass(frozen=True)
class Milestone:
    """A drafter of a recipe after this many text tokens."""

    recipe: str
    tokens: int

    @property
    def method(self) -> str:
        """Its name among a measurement's methods."""
        return f"{self.recipe}@{self.tokens}"


@dataclass(frozen=True)
class Point:
    """τ of a milestone, and how many of its greedy outputs equal plain decoding's.

    `ratio`: its accepted tokens per call, τ − 1, over the last recipe's after the same number of
    tokens; None
        for the last recipe.
    """

    milestone: Milestone
    tau: Estimate
    identical: str
    ratio: Estimate | None


def points(milestones: Sequence[Milestone], records: Sequence[Record]) -> list[Point]:
    """One for every milestone that decoded something, in order. The last one's recipe is the
    reference."""
    found, reference = [], milestones[-1].recipe
    for milestone in milestones:
        mine = counts(records, milestone.method)
        estimate = tau(mine)
        if estimate is None:
            continue
        same = [
            r.identical for r in records if r.method == milestone.method and r.identical is not None
        ]
        ratio = None
        if milestone.recipe != reference:
            ratio = accepted_ratio(
                counts(records, Milestone(reference, milestone.tokens).method), mine
            )
        found.append(Point(milestone, estimate, f"{sum(same)}/{len(same)}" if same else "", ratio))
    return found


def table(found: Sequence[Point], parameters: Mapping[str, int]) -> str:
    """Markdown: a row for each milestone. `parameters`: trained ones, by recipe."""
    reference = found[-1].milestone.recipe if found else ""
    header = [
        *("text tokens", "recipe", "parameters", "τ [95%]", f"accepted, of {reference}'s"),
        *("identical", "prompts"),
    ]
    rows = [
        (
            f"{point.milestone.tokens:,}",
            point.milestone.recipe,
            f"{parameters[point.milestone.recipe] / 1e6:.2f}M",
            format_estimate(point.tau, "", ".3f"),
            "" if point.ratio is None else format_estimate(point.ratio, "", ".3f"),
            point.identical,
            str(point.tau.prompts),
        )
        for point in sorted(found, key=lambda point: point.milestone.tokens)
    ]
    return markdown_table(header, rows) + "\n"


def curves(found: Sequence[Point], title: str) -> bytes:
    """τ over text tokens, a line with intervals for each recipe, as a PNG."""
    with literal_text():
        return _draw(found, title)


def _draw(found: Sequence[Point], title: str) -> bytes:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    recipes = list(dict.fromkeys(point.milestone.recipe for point in found))
    lines = []
    for number, recipe in enumerate(recipes):
        own = [point for point in found if point.milestone.recipe == recipe]
        own.sort(key=lambda point: point.milestone.tokens)
        bars = [error_bar(point.tau) or [[0.0], [0.0]] for point in own]
        line = axes.errorbar(
            [point.milestone.tokens for point in own],
            [point.tau.value for point in own],
            yerr=[[below[0] for below, _ in bars], [above[0] for _, above in bars]],
            color=COLOURS[number % len(COLOURS)],
            capsize=3,
            marker="o",
            markersize=4,
        )
        lines.append(line)
    set_log_axis(axes, (point.milestone.tokens for point in found))
    axes.set_xlabel("text tokens trained on")
    axes.set_ylabel("τ, tokens per target forward pass")
    axes.set_title(title)
    # given with their lines: matplotlib would hide a label that begins with `_`
    axes.legend(lines, recipes, fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return to_png(figure)
