"""The report's plots, drawn by matplotlib, as one PNG. Needs no display."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate, counts, times
from decode.evaluation.summary import Summary, format_method
from decode.systems.registry import PLAIN

COLOURS = ("#1f6f8b", "#c8553d", "#6a8d3a", "#8a5a9e", "#b58900", "#555555")
MANY = 6
"""With more methods than this, lines and legends are unreadable."""


def picture(summary: Summary, records: Sequence[Record], title: str) -> bytes:
    """The plots of a report as one PNG: speed-up and τ over all suites; acceptance and prompts of
    at most `MANY` methods."""
    methods = [method for method in summary.overall if method != PLAIN]
    heights = [max(2.4, 1.2 + 0.26 * len(methods)), *([4.2] if len(methods) <= MANY else [])]
    with literal_text():
        figure = Figure(figsize=(12.8, max(sum(heights), 4.2)), layout="constrained")
        figure.suptitle(title)
        places = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
        labels = {method: format_method(method, summary.overall[method]) for method in methods}
        _draw_ranked(places[0, 0], summary, labels, "speedup")
        places[0, 0].set_title("speed-up over plain decoding, 95% interval")
        _draw_ranked(places[0, 1], summary, labels, "tau")
        places[0, 1].set_title("τ, tokens per target forward pass, 95% interval")
        if len(methods) <= MANY:
            _draw_acceptance(places[1, 0], summary, labels)
            _draw_prompts(places[1, 1], records, labels)
        return to_png(figure)


def _draw_ranked(axes: Axes, summary: Summary, labels: dict[str, str], name: str) -> None:
    """The estimates of that name of all methods: a bar each, with its interval."""
    for y, method in enumerate(reversed(labels)):
        estimate: Estimate | None = getattr(summary.overall[method], name)
        if estimate is None:
            continue
        error = error_bar(estimate)
        colour = COLOURS[1] if summary.overall[method].lossy else COLOURS[0]
        axes.barh(y, estimate.value, xerr=error, capsize=2, height=0.7, color=colour, alpha=0.85)
        end = max(estimate.value, estimate.hi or 0.0)
        axes.text(end + 0.02, y, f"{estimate.value:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(labels)), [*reversed(labels.values())], fontsize=8)
    axes.margins(x=0.12, y=0.01)
    _finish(axes)


def error_bar(estimate: Estimate) -> list[list[float]] | None:
    """How far the interval reaches below and above the value; None without one."""
    if estimate.lo is None or estimate.hi is None:
        return None
    value = estimate.value
    return [[value - min(estimate.lo, value)], [max(estimate.hi, value) - value]]


def _draw_acceptance(axes: Axes, summary: Summary, labels: dict[str, str]) -> None:
    """Acceptance of the k-th drafted token: solid unconditional, dashed given that all before it
    were accepted."""
    for (method, label), colour in zip(labels.items(), COLOURS, strict=False):
        found = summary.overall[method].acceptance
        at = [a.position for a in found]
        shares = [a.unconditional for a in found]
        axes.plot(at, shares, "-o", color=colour, markersize=4, label=label)
        given = [float("nan") if a.conditional is None else a.conditional for a in found]
        axes.plot(at, given, "--", color=colour, linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("drafted position k")
    axes.set_ylabel("share accepted")
    axes.set_title("Acceptance (dashed: given that all before were accepted)")
    _finish(axes)


def _draw_prompts(axes: Axes, records: Sequence[Record], labels: dict[str, str]) -> None:
    """One dot per prompt: its τ against its speed-up."""
    plain = times(records, PLAIN)
    for (method, label), colour in zip(labels.items(), COLOURS, strict=False):
        mine = times(records, method)
        counted = counts(records, method)
        keys = sorted(plain.keys() & mine.keys() & counted.keys())
        x = [counted[key][0] / counted[key][1] for key in keys]
        y = [plain[key] / mine[key] for key in keys]
        axes.scatter(x, y, s=14, alpha=0.7, color=colour, label=label)
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_xlabel("τ of the prompt")
    axes.set_ylabel("speed-up of the prompt")
    axes.set_title("Every prompt")
    _finish(axes)


def _finish(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)
    hide_frame(axes)


def hide_frame(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)


@contextmanager
def literal_text() -> Iterator[None]:
    """Context manager in which plots show names literally (`$` starts no formula) and ignore the
    user's matplotlibrc."""
    with rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        rcdefaults()
        rcParams["text.parse_math"] = False
        yield


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
