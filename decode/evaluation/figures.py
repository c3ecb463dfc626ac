"""The report's plots, drawn by matplotlib, as one PNG. Needs no display."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate, counts, times
from decode.evaluation.summary import Summary, format_method
from decode.systems.registry import PLAIN

COLOURS = ("#1f6f8b", "#c8553d", "#6a8d3a", "#8a5a9e", "#b58900", "#555555")
MANY = 6
"""With more methods than this, lines and legends are unreadable."""

Name = Literal["speedup", "tau"]
"""A field of `Figures` with an interval."""


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _methods(summary: Summary) -> list[str]:
    return [method for method in summary.overall if method != PLAIN]


def _label(summary: Summary, method: str) -> str:
    return format_method(method, summary.overall[method])


def error_bar(estimate: Estimate) -> list[list[float]] | None:
    """How far the interval reaches below and above the value; None without one."""
    if estimate.lo is None or estimate.hi is None:
        return None
    value = estimate.value
    return [[value - min(estimate.lo, value)], [max(estimate.hi, value) - value]]


def _top(estimate: Estimate) -> float:
    return max(estimate.value, estimate.hi or 0.0)


def draw_acceptance(axes: Axes, summary: Summary) -> None:
    """Acceptance of the k-th drafted token: solid unconditional, dashed given that all before it
    were accepted."""
    for m, method in enumerate(_methods(summary)):
        found, label = summary.overall[method].acceptance, _label(summary, method)
        at = [a.position for a in found]
        axes.plot(
            at, [a.unconditional for a in found], "-o", color=_colour(m), markersize=4, label=label
        )
        given = [float("nan") if a.conditional is None else a.conditional for a in found]
        axes.plot(at, given, "--", color=_colour(m), linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("drafted position k")
    axes.set_ylabel("share accepted")
    axes.set_title("Acceptance (dashed: given that all before were accepted)")
    _finish(axes)


def draw_prompts(axes: Axes, summary: Summary, records: Sequence[Record]) -> None:
    """One dot per prompt: its τ against its speed-up."""
    plain = times(records, PLAIN)
    for m, method in enumerate(_methods(summary)):
        mine, counted = times(records, method), counts(records, method)
        keys = sorted(plain.keys() & mine.keys() & counted.keys())
        x = [counted[key][0] / counted[key][1] for key in keys]
        y = [plain[key] / mine[key] for key in keys]
        axes.scatter(x, y, s=14, alpha=0.7, color=_colour(m), label=_label(summary, method))
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_xlabel("τ of the prompt")
    axes.set_ylabel("speed-up of the prompt")
    axes.set_title("Every prompt")
    _finish(axes)


def _finish(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_ranked(axes: Axes, summary: Summary, name: Name, title: str) -> None:
    """One figure of many methods over all suites: a bar each, with its interval."""
    methods = _methods(summary)[::-1]
    for y, method in enumerate(methods):
        estimate = getattr(summary.overall[method], name)
        if estimate is None:
            continue
        colour = COLOURS[1] if summary.overall[method].lossy else COLOURS[0]
        error = error_bar(estimate)
        axes.barh(y, estimate.value, xerr=error, capsize=2, height=0.7, color=colour, alpha=0.85)
        axes.text(_top(estimate) + 0.02, y, f"{estimate.value:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_yticks(
        range(len(methods)), [_label(summary, method) for method in methods], fontsize=8
    )
    axes.margins(x=0.12, y=0.01)
    axes.set_title(title)
    _finish(axes)


def picture(summary: Summary, records: Sequence[Record], title: str) -> bytes:
    """The plots of a report as one PNG: speed-up and τ over all suites; acceptance and prompts of
    at most `MANY` methods."""
    with literal_text():
        return _draw_all(summary, records, title)


@contextmanager
def literal_text() -> Iterator[None]:
    """Within it pictures show names literally (`$` begins no formula), and a user's matplotlibrc
    has no effect."""
    with rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        rcdefaults()
        rcParams["text.parse_math"] = False
        yield


def set_log_axis(axes: Axes, at: Iterable[float]) -> None:
    """A logarithmic x axis with a label at each of these places: matplotlib's own labels are
    formulas."""
    places = sorted(set(at))
    axes.set_xscale("log")
    axes.set_xticks(places, labels=[_format_amount(place) for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _format_amount(number: float) -> str:
    """1,500,000 as 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()


def _draw_all(summary: Summary, records: Sequence[Record], title: str) -> bytes:
    count = len(_methods(summary))
    heights = [max(2.4, 1.2 + 0.26 * count), *([4.2] if count <= MANY else [])]
    figure = Figure(figsize=(12.8, max(sum(heights), 4.2)), layout="constrained")
    figure.suptitle(title)
    places = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    draw_ranked(places[0, 0], summary, "speedup", "speed-up over plain decoding, 95% interval")
    draw_ranked(places[0, 1], summary, "tau", "τ, tokens per target forward pass, 95% interval")
    if count <= MANY:
        draw_acceptance(places[1, 0], summary)
        draw_prompts(places[1, 1], summary, records)
    return to_png(figure)
