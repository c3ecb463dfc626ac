"""The report's plots, drawn by matplotlib, as one PNG. Needs no display and no torch."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from decode.method_names import PLAIN
from decode.reporting.records import Record
from decode.reporting.statistics import counts, times
from decode.reporting.summary import named, titles
from decode.reporting.sweeps import coloured, grids, heat

_COLOURS = ("#1f6f8b", "#c8553d", "#6a8d3a", "#8a5a9e", "#b58900", "#555555")

MANY = 6
"""With more methods than this, bars side by side and legends can't be read."""


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _methods(summary: dict[str, Any]) -> list[str]:
    return [m for m in summary["overall"] if m != PLAIN]


def _label(summary: dict[str, Any], method: str) -> str:
    return named(method, summary["overall"][method])


def _error(figures: dict[str, Any], of: str) -> list[list[float]] | None:
    """How far the interval of the figure `of` goes below and above it; None where it has none."""
    value, lo, hi = figures[of], figures.get(f"{of}_lo"), figures.get(f"{of}_hi")
    return None if lo is None or hi is None else [[value - min(lo, value)], [max(hi, value) - value]]


def _bars(axes: Axes, summary: dict[str, Any], of: str) -> list[tuple[float, dict[str, Any]]]:
    """A bar per suite and method, as high as the figure `of`, with its interval. Returns where each bar stands, and its
    figures."""
    methods, suites = _methods(summary), list(summary["suites"])
    width = min(0.8 / max(len(methods), 1), 0.3)
    drawn = []
    for m, method in enumerate(methods):
        for s, suite in enumerate(suites):
            figures = summary["suites"][suite].get(method)
            if not figures or figures[of] is None:
                continue
            value, error = figures[of], _error(figures, of)
            x = s + (m - (len(methods) - 1) / 2) * width
            label = _label(summary, method) if s == 0 else None
            axes.bar(x, value, width * 0.92, yerr=error, capsize=3, color=_colour(m), label=label)
            drawn.append((x, figures))
    axes.set_xticks(range(len(suites)), suites)
    axes.set_xlim(-0.6, len(suites) - 0.4)
    return drawn


def speedups(axes: Axes, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """Speed-up per suite and method with its 95% interval; the line at 1 is plain decoding."""
    for x, figures in _bars(axes, summary, "speedup"):
        value = figures["speedup"]
        top = max(value, figures["speedup_hi"] or 0) + 0.02
        axes.text(x, top, f"{value:.2f}", ha="center", va="bottom", fontsize=8)
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.margins(y=0.15)
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("Speed-up, 95% interval")
    _legend(axes)


def taus(axes: Axes, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """τ per suite and method: bars micro with its interval, dots macro."""
    for x, figures in _bars(axes, summary, "tau"):
        axes.plot(x, figures["tau_macro"], "o", color="#222222", markersize=4)
    axes.axhline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_ylabel("τ, tokens per target call")
    axes.set_title("τ, 95% interval (dot: mean over prompts)")
    _legend(axes)


def acceptance_by_position(axes: Axes, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """Acceptance of the k-th drafted token: solid unconditional, dashed given that all before it were accepted."""
    for m, method in enumerate(_methods(summary)):
        rows, label = summary["overall"][method]["acceptance"], _label(summary, method)
        at, share = [row["position"] for row in rows], [row["unconditional"] for row in rows]
        axes.plot(at, share, "-o", color=_colour(m), markersize=4, label=label)
        axes.plot(at, [row["conditional"] for row in rows], "--", color=_colour(m), linewidth=1)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("drafted position k")
    axes.set_ylabel("share accepted")
    axes.set_title("Acceptance (dashed: given that all before were accepted)")
    _legend(axes)


def per_prompt(axes: Axes, summary: dict[str, Any], records: Sequence[Record]) -> None:
    """One dot a prompt: its τ against its speed-up."""
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
    _legend(axes)


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


PLOTS = (speedups, taus, acceptance_by_position, per_prompt)


def ranked(axes: Axes, summary: dict[str, Any], of: str, title: str) -> None:
    """One figure of many methods, over all suites: a bar each, with its interval."""
    methods = _methods(summary)[::-1]
    for y, method in enumerate(methods):
        figures = summary["overall"][method]
        value = figures[of]
        if value is None:
            continue
        error = _error(figures, of)
        colour = _COLOURS[1] if figures["lossy"] else _COLOURS[0]
        axes.barh(y, value, xerr=error, capsize=2, height=0.7, color=colour, alpha=0.85)
        axes.text(max(value, figures.get(f"{of}_hi") or 0) + 0.02, y, f"{value:.2f}", va="center", fontsize=8)
    axes.axvline(1.0, color="#333333", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(methods)), [_label(summary, m) for m in methods], fontsize=8)
    axes.margins(x=0.12, y=0.01)
    axes.set_title(title)
    _legend(axes)


def by_suite(axes: Axes, summary: dict[str, Any], of: str, title: str) -> None:
    """One figure of many methods on every suite, as a coloured table."""
    methods, suites = _methods(summary), list(summary["suites"])
    values = [[summary["suites"][s].get(m, {}).get(of) or float("nan") for s in suites] for m in methods]
    shown = titles(summary)
    coloured(axes, values, [shown.get(s, s) for s in suites], [_label(summary, m) for m in methods], 8)
    axes.tick_params(labelsize=8)
    axes.set_title(title)


def picture(summary: dict[str, Any], records: Sequence[Record], title: str) -> bytes:
    """The plots of a report as one PNG: the four of `PLOTS`; of more than `MANY` methods, `ranked` and `by_suite` for speed-up and τ.
    Below them, speed-up and τ over the grid of each sweep."""
    with as_written():
        return _drawn(summary, records, title)


@contextmanager
def as_written() -> Iterator[None]:
    """Inside this context pictures show names as they are: `$` begins no formula, and nothing is said of characters that the font lacks.
    A matplotlibrc changes nothing: one that asks for TeX would ask for its programs after all was measured."""
    with rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rcdefaults()
        rcParams["text.parse_math"] = False
        yield


def logarithmic(axes: Axes, at: Iterable[float]) -> None:
    """A logarithmic x axis with a label at each of these places: matplotlib's own labels are formulas."""
    places = sorted(set(at))
    axes.set_xscale("log")
    axes.set_xticks(places, labels=[_amount(place) for place in places])
    axes.xaxis.set_minor_formatter(NullFormatter())


def _amount(number: float) -> str:
    """1,500,000 as 1.5M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _drawn(summary: dict[str, Any], records: Sequence[Record], title: str) -> bytes:
    swept, count = grids(summary), len(_methods(summary))
    many, several = count > MANY, len(summary["suites"]) > 1
    first = [max(4.2, 1.2 + 0.26 * count)] * (1 + several) if many else [4.2, 4.2]
    heights = [*first, *[4.2] * len(swept)]
    figure = Figure(figsize=(12.8, sum(heights)), layout="constrained")
    figure.suptitle(title)
    places = figure.subplots(len(heights), 2, squeeze=False, height_ratios=heights)
    if many:
        shown = ("speedup", "speed-up over plain decoding"), ("tau", "τ, tokens per target call")
        for axes, (of, says) in zip(places[0], shown, strict=True):
            ranked(axes, summary, of, f"{says}, 95% interval")
        for axes, (of, says) in zip(places[1] if several else (), shown, strict=False):
            by_suite(axes, summary, of, says)
    else:
        for axes, plot in zip(places[:2].flat, PLOTS, strict=True):
            plot(axes, summary, records)
    for row, grid in zip(places[len(first) :], swept, strict=True):
        heat(row[0], summary, grid, "speedup", "speed-up")
        heat(row[1], summary, grid, "tau", "τ")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, metadata={"Software": None})
    return buffer.getvalue()
