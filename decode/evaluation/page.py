"""A measurement's report, made from its records: summary.json, report.html, share.png. The page holds
its charts (drawn by Plotly), scripts and data, and fetches nothing."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

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
from specalign.common.text import cut, html_text, plural

REPORT, CARD = "report.html", "share.png"
_WEB = Path(__file__).with_name("web")

_DIVERGENCE = (
    "suite", "prompt", "method", "batch", "repeat", "first difference", "tokens", "gap",
    "rounding bound", "verdict",
)  # fmt: skip

_DEFINITIONS = (
    "Speed-up: plain decoding's time per token, averaged over prompts, divided by the method's, "
    "both excluding prefill and the first token. The interval (95%) is a paired "
    "jackknife over prompts, the turns of a conversation together.",
    "τ: tokens committed per verifying target forward pass (accepted drafts and the target's own "
    "token), excluding the prefill's token and anything after an end of sequence or a limit; "
    "pooled over all forward passes (others: acceptance length, mean accepted length). τ macro: "
    "the mean of the prompts' own τ (per-request mean). Mean accepted tokens are τ − 1.",
    "Acceptance at position k: the share of rounds with at least k drafted tokens in which the "
    "k-th was accepted.",
    "In-domain: τ that training estimated on held-out rows of its data; not a result. A suite's "
    "prompt overlaps if it shares 13 words in a row with the training data.",
    "Score: the suite's own metric, applied alike to plain and drafted answers: exact match "
    "(math-verify), multiple choice, last line, pass@1 (all tests run to their end), ROUGE-L "
    "(F measure). Cut: answers that ended at the length limit, often before their result. The "
    "interval of a difference is paired by prompt.",
)


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
    """The whole page."""
    drawn = charts.make_charts(summary, records)
    baseline = tables.baseline_line(summary.run.baseline)
    more = tables.extra_tables(summary).items()
    parts = [
        f'<p class="soft">{html_text(tables.headline(summary))} · {html_text(_hardware(summary))}</p>',
        f"<h1>{html_text(headline(summary))}</h1>",
        _cards(summary),
        f'<p class="verdict">{html_text(summary.verdict)}</p>',
        render_charts(drawn[:1]),
        _replay(replays),
        "<h2>Figures</h2>",
        render_table(*tables.overview(summary)) if len(summary.suites) > 1 else "",
        render_table(tables.COLUMNS, [tuple(row.values()) for row in tables.rows(summary)]),
        *(f"<h3>{html_text(title)}</h3>{render_table(*table)}" for title, table in more),
        render_charts(drawn[1:]),
        f"<p>{html_text(baseline)}</p>" if baseline else "",
        "<h2>Lossless?</h2>" + _losslessness(summary, records),
        "<h2>Prompts</h2>" + _list([*tables.source_lines(summary), *tables.unscored(summary)]),
        "<h2>How it was measured</h2>" + _list(_method_notes(summary)),
        "<h2>Copy as Markdown</h2><details><summary>Table in Markdown</summary>"
        f"<pre>{html_text(tables.markdown(summary))}</pre></details>",
        "<h2>Settings and machine</h2>" + _facts(summary),
    ]
    data = {"charts": [asdict(chart) for chart in drawn], "replays": [*replays]}
    return fill_page("Speed report", "".join(parts), data)


def fill_page(title: str, body: str, data: Mapping[str, object]) -> str:
    """A page with this body; Plotly, and the script that draws `data`, are part of it."""
    from plotly.offline import get_plotlyjs  # 5 MB of text: only where a page is written

    style, script = ((_WEB / name).read_text(encoding="utf-8") for name in ("style.css", "page.js"))
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html_text(title)}</title><style>{style}</style>"
    )
    scripts = (
        f'<script type="application/json" id="report-data">{text}</script>'
        f"<script>{get_plotlyjs()}</script><script>{script}</script>"
    )
    return (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f"<body><main>{body}</main>{scripts}</body></html>\n"
    )


def _hardware(summary: Summary) -> str:
    """What it ran on, in a few words."""
    machine, threads = summary.run.machine, int(summary.settings.get("threads") or 1)
    where = f"{machine.get('processor', 'unknown processor')}, {plural(threads, 'thread')}"
    if str(summary.settings.get("device")).startswith("cuda"):
        where = machine.get("gpu", where)
    return f"batch {summary.batch} · {where}"


def _cards(summary: Summary) -> str:
    """The main figures of the first drafting method."""
    best = find_best(summary)
    if not best:
        return ""
    figures_ = summary.overall[best]
    cards = [
        (format_number(value_of(figures_.speedup), 2, "×"), f"speed-up, {best}"),
        (format_number(value_of(figures_.tau)), "τ, tokens per forward pass"),
    ]
    if figures_.identical is not None:
        cards.append((f"{figures_.identical}/{figures_.prompts}", "outputs identical"))
    if figures_.tokens_per_s is not None:
        plain = format_number(summary.overall[PLAIN].tokens_per_s, 1)
        cards.append((f"{figures_.tokens_per_s:.1f}", f"tokens per second (plain {plain})"))
    body = "".join(
        f'<div class="card"><b>{html_text(value)}</b>{html_text(name)}</div>'
        for value, name in cards
    )
    return f'<div class="cards">{body}</div>'


def render_charts(drawn: Sequence[charts.Chart]) -> str:
    """Boxes that the page's script draws into."""
    boxes = [
        f'<div class="chart"><h3>{html_text(chart.title)}</h3>'
        f'<p class="note">{html_text(chart.note)}</p>'
        f'<div class="plot" id="plot-{chart.name}"></div></div>'
        for chart in drawn
    ]
    return f'<div class="charts">{"".join(boxes)}</div>'


def _replay(replays: Sequence[JsonObject]) -> str:
    if not replays:
        return ""
    note = (
        "Accepted drafts are colored by their position in the round, rejected ones of the last "
        "round are struck through (of a tree, only one branch). The slider steps through the "
        "last method's rounds; the others show their output so far."
    )
    return (
        f'<h2>Replay</h2><p class="note">{note}</p><div class="bar">'
        '<select id="replay-choice" aria-label="prompt"></select><button id="play">Play</button>'
        '<input id="round" type="range" min="0" value="0" aria-label="round">'
        '<span id="clock" class="soft"></span></div>'
        '<p class="soft" id="replay-prompt"></p><div class="replay" id="replay"></div>'
    )


def render_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table of text."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    rows = "".join(line(row, "td") for row in body)
    return f'<div class="wide"><table>{line(header, "th")}{rows}</table></div>'


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html_text(line)}</li>" for line in lines) + "</ul>"


def _losslessness(summary: Summary, records: Sequence[Record]) -> str:
    if not summary.greedy:
        return (
            "<p>Sampled outputs are random and not compared. Exact verifiers keep the "
            "target's distribution.</p>"
        )
    body = []
    for r in records:
        if d := r.divergence:
            place = (r.suite, r.prompt, r.method, str(r.batch), str(r.repeat), str(d.index))
            sizes = (format_number(d.gap, 6), format_number(d.bound, 6))
            body.append((*place, f"{d.plain_token} / {d.token}", *sizes, d.kind))
    if not body:
        return (
            "<p>Every greedy output of an exact verifier equals plain decoding's, token "
            "for token.</p>"
        )
    style = ' class="bug"' if summary.bugs else ""
    found = (
        f"<p{style}>{plural(len(body), 'output')} differ from plain decoding's. Where the gap is "
        "within the bound, rounding explains the difference; any other difference is a bug.</p>"
    )
    return found + render_table(_DIVERGENCE, body)


def _method_notes(summary: Summary) -> list[str]:
    settings = summary.settings
    tuned = settings.get("tuned")
    order = (
        "All methods run on a prompt, in varying order, before the next prompt begins; "
        f"{settings.get('repeats', 1)} repeat(s) of each prompt, after "
        f"{settings.get('warmup', 0)} untimed round(s)."
    )
    notes = [f"Settings tuned on other prompts: {'; '.join(tuned)}."] if tuned else []
    return [*notes, order, *_DEFINITIONS]


def _facts(summary: Summary) -> str:
    names = ("settings", "machine", "versions", "git_commit", "started")
    facts = {name: getattr(summary.run, name) for name in names}
    facts["load_average"] = summary.load_average
    shown = json.dumps(facts, indent=1, ensure_ascii=False)
    return f"<pre>{html_text(summary.run.command)}\n{html_text(shown)}</pre>"


def compare_runs(folders: Sequence[Path]) -> str:
    """A page that compares several measurements. Raises UserError as `make_report` does."""
    summaries = [make_report(folder)[0] for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len({*names}) < len(names):  # a/report and b/report
        names = list(map(str, folders))
    header = ("run", "method", "speed-up [95%]", "τ [95%]", "identical", "suites", "processor")
    body = []
    for name, summary in zip(names, summaries, strict=True):
        for method, found in summary.overall.items():
            if method != PLAIN:
                body.append((
                    name, format_method(method, found), format_estimate(found.speedup),
                    format_estimate(found.tau, ""), tables.describe_identity(found),
                    ", ".join(summary.titles.values()),
                    str(summary.run.machine.get("processor", "unknown")),
                ))  # fmt: skip
    differing = _find_differences(summaries)
    chart = charts.compare_speeds(names, summaries)
    parts = [
        f"<h1>{html_text(' · '.join(names))}</h1>",
        render_charts([chart]),
        "<h2>Figures</h2>" + render_table(header, body),
        *(
            f"<h3>{html_text(name)}</h3>{_list(list_reservations(summary))}"
            for name, summary in zip(names, summaries, strict=True)
        ),
        "<h2>Settings that differ</h2>" + render_table(("setting", *names), differing),
    ]
    return fill_page("Comparison", "".join(parts), {"charts": [asdict(chart)], "replays": []})


def _find_differences(summaries: Sequence[Summary]) -> list[list[str]]:
    keys = dict.fromkeys(key for summary in summaries for key in summary.settings)
    rows = []
    for key in keys:
        values = [json.dumps(s.settings.get(key), ensure_ascii=False) for s in summaries]
        if len({*values}) > 1:
            rows.append([key, *(cut(value, 60) for value in values)])
    return rows
