"""τ over the text tokens that drafters were trained on: one table and one picture for several
recipes. Intervals are over prompts (decode/evaluation/statistics.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from decode.evaluation.figures import COLOURS, error_bar, hide_frame, literal_text, to_png
from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate, accepted_ratio, counts, format_estimate, tau
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

    ratio: its accepted tokens per call, τ − 1, over the last recipe's after the same number of
        tokens; None for the last recipe.
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
        own = [r.identical for r in records if r.method == milestone.method]
        same = [identical for identical in own if identical is not None]
        ratio = None
        if milestone.recipe != reference:
            base = counts(records, Milestone(reference, milestone.tokens).method)
            ratio = accepted_ratio(base, mine)
        found.append(Point(milestone, estimate, f"{sum(same)}/{len(same)}" if same else "", ratio))
    return found


def table(found: Sequence[Point], parameters: Mapping[str, int]) -> str:
    """Markdown: a row for each milestone. `parameters`: trained ones, by recipe."""
    reference = found[-1].milestone.recipe if found else ""
    header = (
        "text tokens", "recipe", "parameters", "τ [95%]", f"accepted, of {reference}'s",
        "identical", "prompts",
    )  # fmt: skip
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
        places = sorted({point.milestone.tokens for point in found})
        axes.set_xscale("log")
        # matplotlib's own labels are formulas
        axes.set_xticks(places, labels=[_format_amount(place) for place in places])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("text tokens trained on")
        axes.set_ylabel("τ, tokens per target forward pass")
        axes.set_title(title)
        # given with their lines: matplotlib would hide a label that begins with `_`
        axes.legend(lines, recipes, fontsize=8, frameon=False)
        hide_frame(axes)
        return to_png(figure)


def _format_amount(number: float) -> str:
    """1,500,000 as 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
