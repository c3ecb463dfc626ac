"""The report's charts as Plotly figures: data and layout, drawn by the page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from decode.evaluation import statistics as stats
from decode.evaluation.records import Record
from decode.evaluation.statistics import Estimate
from decode.evaluation.summary import Figures, Summary, format_method, swept_points
from decode.systems.registry import PLAIN
from specalign.common.schema import JsonObject

COLOURS = ("#2a78b5", "#d1602f", "#4c9a52", "#8a5fb0", "#b8860b", "#7a7a7a")
MANY = 6  # methods beyond which lines are unreadable: charts of lines show the first ones
MOST_CATEGORIES, HEAD, TAIL = 12, 9, 14
"""Categories that fit next to each other, and characters of a name's beginning and end."""
_NAMES: JsonObject = {"type": "category"}
"""An axis of names, also where they look like numbers or dates."""
_SPEEDUPS: JsonObject = {
    "barmode": "group", "xaxis": _NAMES, "yaxis": {"title": {"text": "speed-up"}},
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """One chart: its title, what it shows, and a Plotly figure's traces and layout."""

    name: str
    title: str
    note: str
    traces: list[JsonObject]
    layout: JsonObject = field(default_factory=dict)


def make_charts(summary: Summary, records: Sequence[Record]) -> list[Chart]:
    """The charts that these records allow. Except for `batches`, of the first batch size."""
    of_size = [record for record in records if record.batch == summary.batch]
    of_first = partial(_note_first, summary)
    charts = [
        _chart_speed(summary),
        of_first(_chart_positions(summary)),
        of_first(_chart_categories(summary, of_size)),
        of_first(_chart_tau(summary, of_size)),
        _chart_time(summary),
        of_first(_chart_batches(summary)),
        *_chart_sweeps(summary),
    ]
    return [chart for chart in charts if chart.traces]


def _note_first(summary: Summary, chart: Chart) -> Chart:
    """A chart of the first methods, with a note if there are more."""
    count = len(_drafting(summary))
    if count <= MANY:
        return chart
    return replace(chart, note=f"{chart.note} The first {MANY} of {count} methods.")


def _drafting(summary: Summary) -> dict[str, str]:
    """Method → its name in charts and its colour's place, without plain decoding."""
    names = [name for name in summary.overall if name != PLAIN]
    return {name: format_method(name, summary.overall[name]) for name in names}


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _with_intervals(found: Sequence[Estimate | None]) -> JsonObject:
    """Heights and error bars; null where there is no estimate, text (which Plotly does not draw;
    null would be an error of 0) where there is no interval."""
    values = [None if one is None else one.value for one in found]
    above = ["none" if one is None or one.hi is None else one.hi - one.value for one in found]
    below = ["none" if one is None or one.lo is None else one.value - one.lo for one in found]
    errors = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return {"y": values, "error_y": errors}


def _bars(
    names: Sequence[str], values: Sequence[Estimate | None], title: str, i: int
) -> JsonObject:
    colour = {"color": _colour(i)}
    return {"type": "bar", "name": title, "x": [*names], "marker": colour} | _with_intervals(values)


def _line(x: Sequence[object], y: Sequence[object], title: str, i: int) -> JsonObject:
    look = {"type": "scatter", "mode": "lines+markers", "line": {"color": _colour(i)}}
    return look | {"name": title, "x": [*x], "y": [*y]}


def _chart_speed(summary: Summary) -> Chart:
    """One bar per method and suite."""
    blocks: dict[str, Mapping[str, Figures]] = {
        summary.titles.get(name, name): methods for name, methods in summary.suites.items()
    }
    if len(blocks) > 1:
        blocks["all"] = summary.overall
    traces = [
        _bars([*blocks], [methods[name].speedup for methods in blocks.values()], title, i)
        for i, (name, title) in enumerate(_drafting(summary).items())
    ]
    line = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 1, "y1": 1}
    layout = _SPEEDUPS | {"shapes": [line]}
    note = "Plain decoding's time per token over the method's; 1: no gain. Error bars: 95%."
    return Chart("speed", "Speed-up by suite", note, traces, layout)


def _chart_positions(summary: Summary) -> Chart:
    traces = []
    for i, (name, title) in enumerate([*_drafting(summary).items()][:MANY]):
        found = summary.overall[name].acceptance
        at = [one.position for one in found]
        traces.append(_line(at, [one.unconditional for one in found], title, i))
        given = _line(at, [one.conditional for one in found], f"{title}, given the ones before", i)
        given["line"] = {"color": _colour(i), "dash": "dot"}
        traces.append(given | {"mode": "lines", "visible": "legendonly"})
    layout = {
        "xaxis": {"title": {"text": "drafted position"}, "dtick": 1},
        "yaxis": {"title": {"text": "share accepted"}, "range": [0, 1.02]},
    }
    note = "Share of rounds with at least that many drafts in which the draft was accepted."
    return Chart("positions", "Acceptance by position", note, traces, layout)


def _chart_categories(summary: Summary, records: Sequence[Record]) -> Chart:
    """τ by category of prompts, where there are several; of many, those with the most prompts."""
    counted = Counter(record.category for record in records if record.category)
    names = [name for name, _ in counted.most_common(MOST_CATEGORIES)]
    if len(names) < 2:
        return Chart("categories", "", "", [])
    traces = []
    for i, (name, title) in enumerate([*_drafting(summary).items()][:MANY]):
        found = [
            stats.tau(stats.counts([r for r in records if r.category == category], name))
            for category in names
        ]
        traces.append(_bars(names, found, title, i) | {"hovertext": names})
    axis = _NAMES | {"tickvals": names, "ticktext": [*map(_shorten, names)]}
    layout = {"barmode": "group", "xaxis": axis, "yaxis": {"title": {"text": "τ"}}}
    note = "τ: tokens committed per forward pass of the target; error bars: 95% intervals."
    if len(names) < len(counted):
        note += f" The {len(names)} largest of {len(counted)} categories."
    return Chart("categories", "τ by category", note, traces, layout)


def _shorten(name: str) -> str:
    """The name without its middle: names that begin alike stay different."""
    return name if len(name) <= HEAD + TAIL else f"{name[:HEAD]}…{name[-TAIL:]}"


def _chart_tau(summary: Summary, records: Sequence[Record]) -> Chart:
    taus = {
        title: [committed / calls for committed, calls in stats.counts(records, name).values()]
        for name, title in [*_drafting(summary).items()][:MANY]
    }
    return chart_taus("prompt", taus)


def chart_taus(unit: str, taus: Mapping[str, Sequence[float]]) -> Chart:
    """The distribution of τ. unit: what each τ is of."""
    traces: list[JsonObject] = []
    for i, (title, values) in enumerate(taus.items()):
        if values:
            marks = {"color": _colour(i), "size": 4}
            trace: JsonObject = {"type": "violin", "name": title, "y": [*values], "points": "all"}
            more = {"jitter": 0.4, "pointpos": 0, "box": {"visible": True}, "spanmode": "hard"}
            traces.append(trace | more | {"marker": marks, "line": {"color": _colour(i)}})
    layout = {"yaxis": {"title": {"text": f"τ of a {unit}"}}, "showlegend": False}
    return Chart("tau", f"τ of every {unit}", f"One dot per {unit}.", traces, layout)


def _chart_time(summary: Summary) -> Chart:
    """Milliseconds of a round: drafting, the target with its verification, and the rest."""
    parts: dict[str, tuple[float, float, float]] = {}
    for name, title in _drafting(summary).items():
        found = summary.overall[name]
        if found.draft_ms is None or found.verify_ms is None or not found.draft_share:
            continue
        rest = found.draft_ms / found.draft_share - found.draft_ms - found.verify_ms
        if rest > 0:
            parts[title] = (found.draft_ms, found.verify_ms, rest)
    names = ("drafting", "target and verification", "rest")
    columns = zip(*parts.values(), strict=True)
    traces = [
        {"type": "bar", "orientation": "h", "name": name, "y": [*parts], "x": [*values]}
        | {"marker": {"color": _colour(i)}}
        for i, (name, values) in enumerate(zip(names, columns, strict=False))
    ]
    layout = {"barmode": "stack", "xaxis": {"title": {"text": "ms per round"}}}
    return Chart("time", "Where a round's time goes", "Means over all rounds.", traces, layout)


def _chart_batches(summary: Summary) -> Chart:
    sizes = [*summary.batches]
    if len(sizes) < 2:
        return Chart("batches", "", "", [])
    speeds = {
        format_method(name, summary.overall[name]): [
            summary.batches[size][name].tokens_per_s for size in sizes
        ]
        for name in [*summary.overall][: MANY + 1]
    }
    return chart_throughput(sizes, speeds)


def chart_throughput(sizes: Sequence[int], speeds: Mapping[str, Sequence[float | None]]) -> Chart:
    """Tokens per second of all requests, by how many run together."""
    traces = [_line(sizes, found, title, i) for i, (title, found) in enumerate(speeds.items())]
    layout = {
        "xaxis": {"title": {"text": "requests together"}, "type": "log", "tickvals": [*sizes]},
        "yaxis": {"title": {"text": "tokens/s of all"}, "rangemode": "tozero"},
    }
    return Chart("batches", "Throughput", "Tokens per second of all requests.", traces, layout)


def _chart_sweeps(summary: Summary) -> list[Chart]:
    """A map of the speed-up over two swept options (SpecDiff's figure 2: γ × T)."""
    charts: list[Chart] = []
    for system, points in swept_points(summary).items():
        cells = {tuple(label.split(" ")): method for label, method in points.items()}
        if any(len(cell) != 2 for cell in cells):
            continue
        rows, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
        found = {cell: stats.value_of(summary.overall[m].speedup) for cell, m in cells.items()}
        speeds = [[found.get((row, column)) for column in columns] for row in rows]
        text = [["" if one is None else f"{one:.2f}" for one in row] for row in speeds]
        trace: JsonObject = {"type": "heatmap", "x": columns, "y": rows, "z": speeds, "text": text}
        look = {"texttemplate": "%{text}", "colorscale": "Viridis"}
        title = f"Speed-up of {system} by two options"
        charts.append(Chart(f"sweep-{len(charts)}", title, "", [trace | look]))
    return charts


def compare_speeds(names: Sequence[str], summaries: Sequence[Summary]) -> Chart:
    """The speed-up of every method in several measurements."""
    speeds = [
        {title: summary.overall[name].speedup for name, title in _drafting(summary).items()}
        for summary in summaries
    ]
    traces = [
        _bars(names, [found.get(title) for found in speeds], title, i)
        for i, title in enumerate(dict.fromkeys(title for found in speeds for title in found))
    ]
    note = "Over each run's own plain decoding."
    if len({str(summary.settings.get("prompts_hash")) for summary in summaries}) > 1:
        note += " The runs measured different prompts: their speed-ups are not comparable."
    return Chart("speed", "Speed-up", note, traces, _SPEEDUPS)
