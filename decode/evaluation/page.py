"""A measurement's report, made from its records: summary.json, report.html, share.png. The page holds
its charts (drawn by Plotly), scripts and data, and fetches nothing."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from decode.evaluation import charts, figures, tables
from decode.evaluation.records import AS_JSON, SUMMARY, Record, read_records, read_replays, read_run
from decode.evaluation.statistics import format_estimate, format_number, value_of
from decode.evaluation.summary import Summary, format_method, summarise
from decode.evaluation.verdict import find_best, headline, list_reservations, verdict
from decode.systems.registry import PLAIN
from specalign.common.errors import UserError
from specalign.common.files import write_atomically, write_json, write_text
from specalign.common.schema import JsonObject
from specalign.common.terminal import PlainConsole
from specalign.common.text import cut, plural, printable

REPORT, CARD = "report.html", "share.png"
_PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("web")),
    autoescape=True,
    finalize=lambda value: printable(value) if type(value) is str else value,
    undefined=StrictUndefined,
)
_PAGES.globals |= {
    "estimate": format_estimate,
    "identity": tables.describe_identity,
    "method_title": format_method,
    "number": format_number,
    "plain": PLAIN,
    "plural": plural,
    "value_of": value_of,
}


def make_report(folder: Path) -> tuple[Summary, list[Record]]:
    """Write summary.json, report.html and share.png into the folder; return the summary and the
    records. Raises UserError: no run.json, no records, or broken ones."""
    run = read_run(folder)
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} contains no records yet: nothing to report")
    try:
        summary = summarise(run, records)
        summary.verdict = verdict(summary)
        text = page(summary, records, read_replays(folder))
    except KeyError as error:
        raise UserError(f"{folder}: run.json lacks the setting {error}") from None
    write_json(folder / SUMMARY, summary.as_json(), **AS_JSON)
    write_text(folder / REPORT, text)
    png = figures.share_card(summary)
    write_atomically(folder / CARD, lambda part: part.write_bytes(png))
    return summary, records


def print_report(
    summary: Summary, folder: Path, console: PlainConsole, sources: bool = True
) -> None:
    """Print table, sources (unless they are on the screen already), baseline and verdict."""
    console.print(tables.table(summary))
    for title, (header, body) in tables.extra_tables(summary).items():
        console.print(tables.plain_table(title, header, body))
    for line in [*tables.unscored(summary), *(tables.source_lines(summary) if sources else ())]:
        console.say(line)
    if line := tables.baseline_line(summary.run.baseline):
        console.say(line)
    console.say(f"\n{summary.verdict}\n")
    console.say(f"Report: {folder / REPORT}", wrap=False)


def page(summary: Summary, records: Sequence[Record], replays: Sequence[JsonObject] = ()) -> str:
    names = ("settings", "machine", "versions", "git_commit", "started")
    facts = {name: getattr(summary.run, name) for name in names}
    facts["load_average"] = summary.load_average
    return fill_page(
        "report.html",
        charts.make_charts(summary, records),
        replays,
        summary=summary,
        subtitle=f"{tables.headline(summary)} · {_describe_hardware(summary)}",
        headline=headline(summary),
        best=find_best(summary),
        overview=tables.overview(summary),
        figures=(tables.COLUMNS, [row.values() for row in tables.rows(summary)]),
        more=tables.extra_tables(summary),
        baseline=tables.baseline_line(summary.run.baseline),
        differences=[record for record in records if record.divergence],
        sources=[*tables.source_lines(summary), *tables.unscored(summary)],
        markdown=tables.markdown(summary),
        facts=json.dumps(facts, indent=1, ensure_ascii=False),
    )


def fill_page(
    name: str, drawn: Sequence[charts.Chart], replays: Sequence[JsonObject] = (), **values: object
) -> str:
    """The page of a template in `web/`, with these charts. Plotly, and the script that draws, are
    part of it."""
    from plotly.offline import get_plotlyjs  # 5 MB of text: only where a page is written

    shown = {"charts": [asdict(chart) for chart in drawn], "replays": [*replays]}
    data = Markup(json.dumps(shown, ensure_ascii=False).replace("<", "\\u003c"))
    plotly = Markup(get_plotlyjs())
    page = _PAGES.get_template(name)
    return page.render(values, charts=drawn, replays=replays, data=data, plotly=plotly)


def _describe_hardware(summary: Summary) -> str:
    """What it ran on, in a few words."""
    machine, threads = summary.run.machine, int(summary.settings.get("threads") or 1)
    where = f"{machine.get('processor', 'unknown processor')}, {plural(threads, 'thread')}"
    if str(summary.settings.get("device")).startswith("cuda"):
        where = machine.get("gpu", where)
    return f"batch {summary.batch} · {where}"


def compare_runs(folders: Sequence[Path]) -> str:
    """A page that compares several measurements. Raises UserError as `make_report` does."""
    summaries = [make_report(folder)[0] for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):  # a/report and b/report
        names = list(map(str, folders))
    return fill_page(
        "comparison.html",
        [charts.compare_speeds(names, summaries)],
        summaries=dict(zip(names, summaries, strict=True)),
        reservations=dict(zip(names, map(list_reservations, summaries), strict=True)),
        differing=_find_differences(summaries),
    )


def _find_differences(summaries: Sequence[Summary]) -> list[list[str]]:
    keys = dict.fromkeys(key for summary in summaries for key in summary.settings)
    rows = []
    for key in keys:
        values = [json.dumps(s.settings.get(key), ensure_ascii=False) for s in summaries]
        if len({*values}) > 1:
            rows.append([key, *(cut(value, 60) for value in values)])
    return rows


def log_report(project: str, folder: Path, summary: Summary, records: Sequence[Record]) -> None:
    """Log the figures, the charts, and the replays as a table to a new W&B run; offline with
    WANDB_MODE=offline."""
    import plotly.graph_objects as plotly
    import wandb

    run = wandb.init(project=project, name=folder.name, config=dict(summary.settings))
    for method, found in summary.overall.items():
        run.summary[f"{method}/speedup"] = value_of(found.speedup)
        run.summary[f"{method}/tau"] = value_of(found.tau)
        run.summary[f"{method}/identical"] = found.identical
        run.summary[f"{method}/score"] = value_of(found.score)
    run.summary["verdict"] = summary.verdict
    for chart in charts.make_charts(summary, records):
        figure = plotly.Figure(data=chart.traces, layout={**chart.layout, "title": chart.title})
        run.log({f"charts/{chart.name}": figure})
    table = wandb.Table(["prompt", "method", "round", "seconds", "accepted", "own", "rejected"])
    for replay in read_replays(folder):
        for lane in replay["lanes"]:
            for number, one in enumerate(lane["rounds"]):
                texts = ("".join(one["accepted"]), one["own"], "".join(one["rejected"]))
                table.add_data(replay["title"], lane["method"], number, one["seconds"], *texts)
    run.log({"replays": table})
    run.finish()
