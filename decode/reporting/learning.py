"""τ over the text tokens that drafters were trained on: one table and one picture for several recipes. Needs no torch.

The figures and their intervals are those of decode/reporting/statistics.py: over prompts, each drawn with all its counts.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from align.common.text import markdown_text
from decode.reporting.figures import as_written, logarithmic
from decode.reporting.records import Record
from decode.reporting.statistics import Estimate, accepted_ratio, counts, tau

COLOURS = ("#1f6f8b", "#c8553d", "#6a8d3a", "#8a5a9e")


@dataclass(frozen=True)
class Milestone:
    """A drafter on its way: which recipe's, after how many text tokens."""

    recipe: str
    tokens: int

    @property
    def method(self) -> str:
        """Its name among a measurement's methods."""
        return f"{self.recipe}@{self.tokens}"


@dataclass(frozen=True)
class Point:
    """τ of a milestone, and how many of its greedy outputs equal plain decoding's; `ratio`: its accepted tokens a call, τ − 1, over those
    of the last recipe after as many tokens; None for the last recipe itself."""

    milestone: Milestone
    tau: Estimate
    identical: str
    ratio: Estimate | None


def points(milestones: Sequence[Milestone], records: Sequence[Record]) -> list[Point]:
    """One for every milestone that decoded something, in their order. The last one's recipe is what the others are compared with."""
    found, last = [], milestones[-1].recipe
    for milestone in milestones:
        mine = counts(records, milestone.method)
        if (estimate := tau(mine)) is None:
            continue
        other = counts(records, Milestone(last, milestone.tokens).method)
        same = [r.identical for r in records if r.method == milestone.method and r.identical is not None]
        ratio = accepted_ratio(other, mine) if milestone.recipe != last else None
        found.append(Point(milestone, estimate, f"{sum(same)}/{len(same)}" if same else "", ratio))
    return found


def table(found: Sequence[Point], parameters: Mapping[str, int]) -> str:
    """Markdown: a row for each milestone. `parameters`: trained ones, by recipe."""
    last = found[-1].milestone.recipe if found else ""
    lines = [
        f"| text tokens | recipe | parameters | τ [95%] | accepted, of {markdown_text(last)}'s | identical | prompts |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in sorted(found, key=lambda p: p.milestone.tokens):
        m = point.milestone
        cells = (
            f"{m.tokens:,}",
            markdown_text(m.recipe),
            f"{parameters[m.recipe] / 1e6:.2f}M",
            _shown(point.tau),
            "" if point.ratio is None else f"{_shown(point.ratio)}",
            point.identical,
            str(point.tau.prompts),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _shown(estimate: Estimate) -> str:
    value = f"{estimate.value:.3f}"
    return value if estimate.lo is None else f"{value} [{estimate.lo:.3f}, {estimate.hi:.3f}]"


def curves(found: Sequence[Point], title: str) -> bytes:
    """τ over text tokens, a line with intervals for each recipe, as a PNG."""
    with as_written():
        return _drawn(found, title)


def _drawn(found: Sequence[Point], title: str) -> bytes:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes, lines = figure.subplots(), list[tuple[Any, str]]()
    for colour, recipe in zip(
        COLOURS * len(found), dict.fromkeys(p.milestone.recipe for p in found), strict=False
    ):
        own = sorted((p for p in found if p.milestone.recipe == recipe), key=lambda p: p.milestone.tokens)
        values = [p.tau.value for p in own]
        below = [p.tau.value - min(p.tau.value, p.tau.lo or p.tau.value) for p in own]
        above = [max(p.tau.value, p.tau.hi or p.tau.value) - p.tau.value for p in own]
        options: dict[str, Any] = {"color": colour, "capsize": 3, "marker": "o", "markersize": 4}
        tokens = [p.milestone.tokens for p in own]
        line = axes.errorbar(tokens, values, yerr=[below, above], **options)
        lines.append((line, recipe))
    logarithmic(axes, (p.milestone.tokens for p in found))
    axes.set_xlabel("text tokens trained on")
    axes.set_ylabel("τ, tokens per target call")
    axes.set_title(title)
    axes.legend(*zip(*lines, strict=True), fontsize=8, frameon=False)  # a label of its own may begin with `_`
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
