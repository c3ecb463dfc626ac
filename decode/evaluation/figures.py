"""The share card: a measurement as one picture of 1200 × 630 pixels, drawn by matplotlib without a
display."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from matplotlib import rc_context, rcdefaults, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.evaluation.charts import COLOURS
from decode.evaluation.statistics import Estimate, format_number, value_of
from decode.evaluation.summary import Figures, Summary, format_method
from decode.evaluation.tables import headline as settings_line
from decode.evaluation.verdict import headline
from decode.systems.registry import PLAIN

_DPI = 100
_MOST_BARS = 6


def share_card(summary: Summary) -> bytes:
    """A PNG with the verdict's headline, a bar for each method, and where it was measured."""
    methods = [name for name in summary.overall if name != PLAIN][:_MOST_BARS]
    with literal_text():
        figure = Figure(figsize=(12, 6.3), dpi=_DPI, facecolor="white")
        title = "\n".join(textwrap.wrap(headline(summary), 44)[:2])
        figure.text(0.05, 0.92, title, fontsize=30, weight="bold", va="top", color="#1c2126")
        where = "\n".join(textwrap.wrap(settings_line(summary), 100)[:2])
        figure.text(0.05, 0.12, where, fontsize=13, va="top", color="#5c6670")
        machine = str(summary.run.machine.get("gpu") or summary.run.machine.get("processor", ""))
        figure.text(0.05, 0.03, machine[:100], fontsize=12, color="#5c6670")
        if methods:
            _draw_bars(figure.add_axes((0.26, 0.2, 0.66, 0.44)), summary, methods)
        return to_png(figure)


def _draw_bars(axes: Axes, summary: Summary, methods: list[str]) -> None:
    for y, name in enumerate(reversed(methods)):
        found: Figures = summary.overall[name]
        if found.speedup is None:
            continue
        colour = COLOURS[1] if found.lossy else COLOURS[0]
        axes.barh(y, found.speedup.value, xerr=error_bar(found.speedup), color=colour, capsize=3)
        text = f"{found.speedup.value:.2f}×   τ {format_number(value_of(found.tau))}"
        end = max(found.speedup.value, found.speedup.hi or 0.0)
        axes.text(end + 0.03, y, text, va="center", fontsize=14)
    axes.axvline(1.0, color="#5c6670", linewidth=1, linestyle="--")
    labels = [format_method(name, summary.overall[name]) for name in reversed(methods)]
    axes.set_yticks(range(len(methods)), [label[:24] for label in labels], fontsize=14)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def error_bar(estimate: Estimate) -> list[list[float]] | None:
    """How far the interval reaches below and above the value; None without one."""
    if estimate.lo is None or estimate.hi is None:
        return None
    value = estimate.value
    return [[value - min(estimate.lo, value)], [max(estimate.hi, value) - value]]


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
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
