"""Summary, picture and page of a measurement, made from its records."""

from __future__ import annotations

from pathlib import Path

from decode.evaluation import figures
from decode.evaluation.page import page
from decode.evaluation.records import AS_JSON, SUMMARY, Record, read_records, read_run
from decode.evaluation.summary import Summary, summarise
from decode.evaluation.sweeps import compare_with_first, describe_best
from decode.evaluation.tables import against_tables, baseline_line, headline, source_lines, table
from decode.evaluation.verdict import verdict
from specalign.common.errors import UserError
from specalign.common.files import write_atomically, write_json, write_text
from specalign.common.terminal import PlainConsole


def make_report(folder: Path) -> tuple[Summary, list[Record]]:
    """Write summary.json, report.png and report.html into the folder; return the summary and the
    records.

    Raises:
        UserError: no run.json, no records, or broken ones.
    """
    run = read_run(folder)
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} holds no records yet: nothing to report")
    try:
        summary = summarise(run, records)
        summary.against_first = compare_with_first(summary, records)
        summary.verdict = " ".join(filter(None, (verdict(summary), describe_best(summary))))
        png = figures.picture(summary, records, headline(summary))
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
    console.print(table(summary))
    for points in against_tables(summary):
        console.print(points)
    for line in source_lines(summary) if sources else ():
        console.say(line)
    if line := baseline_line(summary.run.baseline):
        console.say(line)
    console.say(f"\n{summary.verdict}\n")
    console.say(f"Report: {folder / 'report.html'}", wrap=False)
