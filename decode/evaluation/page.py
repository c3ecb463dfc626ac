"""A measurement's report, made from its records: summary.json, the plots, and one HTML file, which
holds its pictures, runs no script and fetches nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from decode.evaluation import figures, tables
from decode.evaluation.records import AS_JSON, SUMMARY, Record, read_records, read_run
from decode.evaluation.statistics import format_number
from decode.evaluation.summary import Summary, summarise
from decode.evaluation.verdict import verdict
from specalign.common.errors import UserError
from specalign.common.files import write_atomically, write_json, write_text
from specalign.common.terminal import PlainConsole
from specalign.common.text import html_text

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0;font-size:.92rem}
td,th{padding:.3rem .7rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child,td:nth-child(2),th:nth-child(2){text-align:left}
.verdict{background:#eef4f6;padding:1rem 1.2rem;border-left:4px solid #1f6f8b}
img{max-width:100%}pre{white-space:pre-wrap;font-size:.85rem}.bug{color:#b00020;font-weight:bold}
"""

_DIVERGENCE = (
    "suite", "prompt", "method", "repeat", "first difference", "tokens", "gap", "rounding bound",
    "verdict",
)  # fmt: skip

_DEFINITIONS = (
    "Speed-up: plain decoding's time per token, averaged over prompts, divided by the method's, "
    "both excluding the prefill and its token. The interval is a paired bootstrap over prompts "
    "(95%).",
    "τ: tokens committed per verifying target forward pass (accepted drafts and the target's own "
    "token), excluding the prefill's token and anything after an end of sequence or a limit. Its "
    "interval uses the same resamples.",
    "Acceptance at position k: the share of rounds with at least k drafted tokens in which the "
    "k-th was accepted; dashed: among rounds in which all earlier tokens were accepted.",
)


def make_report(folder: Path) -> tuple[Summary, list[Record]]:
    """Write summary.json, report.png and report.html into the folder; return the summary and the
    records. Raises UserError: no run.json, no records, or broken ones."""
    run = read_run(folder)
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} contains no records yet: nothing to report")
    try:
        summary = summarise(run, records)
        summary.verdict = verdict(summary)
        png = figures.picture(summary, records, tables.headline(summary))
        text = page(summary, records, png)
    except KeyError as error:
        raise UserError(f"{folder}: run.json lacks the setting {error}") from None
    write_json(folder / SUMMARY, summary.as_json(), **AS_JSON)
    write_atomically(folder / "report.png", lambda part: part.write_bytes(png))
    write_text(folder / "report.html", text)
    return summary, records


def print_report(
    summary: Summary, folder: Path, console: PlainConsole, sources: bool = True
) -> None:
    """Print table, sources (unless they are on the screen already), baseline and verdict."""
    console.print(tables.table(summary))
    for block in tables.against_first(summary).items():
        console.print(tables.plain_table(block[0], tables.AGAINST, block[1]))
    if batches := tables.batch_rows(summary):
        console.print(tables.plain_table("batches", tables.BATCH, batches))
    for line in tables.source_lines(summary) if sources else ():
        console.say(line)
    if line := tables.baseline_line(summary.run.baseline):
        console.say(line)
    console.say(f"\n{summary.verdict}\n")
    console.say(f"Report: {folder / 'report.html'}", wrap=False)


def page(summary: Summary, records: Sequence[Record], png: bytes) -> str:
    """The whole page, with the plots in `png`."""
    baseline = tables.baseline_line(summary.run.baseline)
    gains = tables.against_first(summary).items()
    batches = tables.batch_rows(summary)
    parts = [
        "<h1>Speed-up and losslessness</h1>",
        f"<p>{html_text(tables.headline(summary))}</p>",
        f'<p class="verdict">{html_text(summary.verdict)}</p>',
        _table(*tables.overview(summary)) if len(summary.suites) > 1 else "",
        _table(tables.COLUMNS, [tuple(row.values()) for row in tables.rows(summary)]),
        *(f"<h3>{html_text(t)}</h3>{_table(tables.AGAINST, body)}" for t, body in gains),
        f"<h3>Batches</h3>{_table(tables.BATCH, batches)}" if batches else "",
        f"<p>{html_text(baseline)}</p>" if baseline else "",
        f'<img alt="plots" src="data:image/png;base64,{base64.b64encode(png).decode()}">',
        "<h2>Lossless?</h2>" + _losslessness(summary, records),
        "<h2>Prompts</h2>" + _list(tables.source_lines(summary)),
        "<h2>How it was measured</h2>" + _list(_method_notes(summary)),
        "<h2>Settings and machine</h2>" + _facts(summary),
    ]
    head = f'<meta charset="utf-8"><title>Speed report</title><style>{_STYLE}</style>'
    body = "".join(parts)
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html_text(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{line(header, 'th')}{''.join(line(row, 'td') for row in body)}</table>"


def _list(lines: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{html_text(line)}</li>" for line in lines) + "</ul>"


def _losslessness(summary: Summary, records: Sequence[Record]) -> str:
    lossy = [f"{method} ({f.verifier})" for method, f in summary.overall.items() if f.lossy]
    warning = ""
    if lossy:
        which = html_text(", ".join(lossy))
        warning = f'<p class="bug">Not lossless, because of the requested verifier: {which}.</p>'
    if not summary.greedy:
        return (
            f"{warning}<p>Sampled outputs are random and not compared. Exact verifiers keep the "
            "target's distribution.</p>"
        )
    body = []
    for r in records:
        if d := r.divergence:
            place = (r.suite, r.prompt, r.method, str(r.repeat), str(d.index))
            sizes = (format_number(d.gap, 6), format_number(d.bound, 6))
            body.append((*place, f"{d.plain_token} / {d.token}", *sizes, d.kind))
    if not body:
        return (
            f"{warning}<p>Every greedy output of an exact verifier equals plain decoding's, token "
            "for token.</p>"
        )
    style = ' class="bug"' if summary.bugs else ""
    found = (
        f"<p{style}>{len(body)} outputs differ from plain decoding's. Where the gap is within the "
        "bound, rounding explains the difference; any other difference is a bug.</p>"
    )
    return warning + found + _table(_DIVERGENCE, body)


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
    facts = {
        "settings": summary.settings,
        "machine": summary.run.machine,
        "load_average": summary.load_average,
        "versions": summary.run.versions,
        "git_commit": summary.run.git_commit,
        "started": summary.run.started,
    }
    shown = json.dumps(facts, indent=1, ensure_ascii=False)
    return f"<pre>{html_text(summary.run.command)}\n{html_text(shown)}</pre>"
