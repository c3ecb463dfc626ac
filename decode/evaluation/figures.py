"""The share card: a measurement as one picture of 1200 × 630 pixels, drawn by matplotlib without a
display."""

import io
import textwrap
import warnings

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from decode.evaluation.charts import COLOURS
from decode.evaluation.statistics import Estimate, format_number, value_of
from decode.evaluation.summary import Figures, Summary, format_method
from decode.evaluation.tables import headline as settings_line
from decode.evaluation.verdict import find_best, headline
from decode.systems.registry import PLAIN
from specalign.common.text import plural

_DPI = 100
_MOST_BARS = 6


def share_card(summary: Summary) -> bytes:
    """A PNG with the verdict's headline, a bar for each method, and where it was measured."""
    best = find_best(summary)
    found = sorted((name for name in summary.overall if name != PLAIN), key=lambda m: m != best)
    methods = found[:_MOST_BARS]
    where = settings_line(summary, _describe_prompts(summary))
    if len(methods) < len(found):
        where += f" · {len(methods)} of {len(found)} methods"
    machine = str(summary.run.machine.get("gpu") or summary.run.machine.get("processor", ""))
    # names as they are, whatever the user's matplotlibrc: `$` starts no formula
    plain = style.context(["default", {"text.parse_math": False}])
    with plain, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks
        figure = Figure(figsize=(12, 6.3), dpi=_DPI, facecolor="white")
        title, size = fit(headline(summary), 30, 1200, 90)
        figure.text(0.05, 0.93, title, fontsize=size, weight="bold", va="top", color="#1c2126")
        for y, text, height in ((0.13, where, 26), (0.05, machine, 13)):
            lines, size = fit(text, 13, 1440, height)
            figure.text(0.05, y, lines, fontsize=size, va="top", color="#5c6670")
        if methods:
            _draw_bars(figure.add_axes((0.26, 0.2, 0.66, 0.44)), summary, methods)
        return to_png(figure)


def _describe_prompts(summary: Summary) -> str:
    """How many prompts, and of which suites where the names fit."""
    suites = summary.suites
    count = plural(summary.overall[PLAIN].prompts, "prompt")
    names = ", ".join(summary.titles.get(name, name) for name in suites)
    return f"{count} ({names})" if len(names) <= 60 else f"{count}, {plural(len(suites), 'suite')}"


def fit(text: str, size: int, width: int, height: int) -> tuple[str, int]:
    """The text in lines, and the largest font up to `size` with which these fit. width: characters
    of a line times the size. height: lines times the size."""
    while True:
        lines = textwrap.wrap(text, width // size, break_on_hyphens=False)
        if len(lines) * size <= height or size == 6:
            return "\n".join(lines), size
        size -= 1


def _draw_bars(axes: Axes, summary: Summary, methods: list[str]) -> None:
    for y, name in enumerate(reversed(methods)):
        found: Figures = summary.overall[name]
        if found.speedup is None:
            continue
        colour = COLOURS[1] if found.lossy or found.bugs else COLOURS[0]
        axes.barh(y, found.speedup.value, xerr=error_bar(found.speedup), color=colour, capsize=3)
        text = f"{found.speedup.value:.2f}×   τ {format_number(value_of(found.tau))}"
        end = max(found.speedup.value, found.speedup.hi or 0.0)
        axes.text(end + 0.03, y, text, va="center", fontsize=14)
    axes.axvline(1.0, color="#5c6670", linewidth=1, linestyle="--")
    titles = [format_method(name, summary.overall[name]) for name in reversed(methods)]
    size = min(fit(title, 14, 300, 160 // len(methods))[1] for title in titles)
    labels = [fit(title, size, 300, 160)[0] for title in titles]
    axes.set_yticks(range(len(methods)), labels, fontsize=size)
    axes.margins(x=0.3)
    axes.set_xlim(left=0)
    axes.spines[["top", "right"]].set_visible(False)


def error_bar(estimate: Estimate) -> list[list[float]] | None:
    """How far the interval reaches below and above the value; None without one."""
    if estimate.lo is None or estimate.hi is None:
        return None
    value = estimate.value
    return [[value - min(estimate.lo, value)], [max(estimate.hi, value) - value]]


def to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    return buffer.getvalue()
