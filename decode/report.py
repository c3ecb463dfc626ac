"""`python -m decode.report DIR`: remake summary, page and picture from the records. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from align.errors import UserError, cli
from decode import figures
from decode.arguments import Parser
from decode.page import page
from decode.records import SUMMARY, Record, read_records, read_run, write_json
from decode.summary import summarise, verdict
from decode.sweeps import against_first, best
from decode.tables import against_tables, baseline_line, headline, markdown, source_lines, table


def make_report(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """Write summary.json, report.png and report.html into the folder; give back the summary and the records.

    Raises:
        UserError: no run.json, no records, or broken ones.
    """
    run = read_run(folder)
    records = read_records(folder)
    if not records:
        raise UserError(f"{folder} holds no records yet: nothing to report")
    try:
        summary = summarise(run, records)
        summary["against_first"] = against_first(summary, records)
        summary["verdict"] = " ".join(filter(None, (verdict(summary), best(summary))))
        png = figures.picture(summary, records, headline(summary))
        text = page(summary, records, png)
    except KeyError as error:
        raise UserError(f"{folder}: run.json lacks the setting {error}") from None
    write_json(folder / SUMMARY, summary)
    (folder / "report.png").write_bytes(png)
    (folder / "report.html").write_text(text, encoding="utf-8")
    return summary, records


def print_report(summary: dict[str, Any], folder: Path, console: Console) -> None:
    """Table, sources, baseline and verdict to the terminal."""
    console.print(table(summary))
    for points in against_tables(summary):
        console.print(points)
    for line in (*source_lines(summary), baseline_line(summary)):
        if line:
            console.print(line, markup=False, highlight=False)
    console.print(f"\n{summary['verdict']}\n", markup=False, highlight=False)
    console.print(f"Report: {folder / 'report.html'}", markup=False, highlight=False, soft_wrap=True)


@cli
def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = Parser(
        prog="python -m decode.report", description="Remake a measurement's report from its records."
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="what `python -m decode.eval --out DIR` wrote"
    )
    parser.add_argument("--markdown", action="store_true", help="print the table for a README, nothing else")
    options = parser.parse_args(arguments)
    summary, _ = make_report(options.folder)
    if options.markdown:
        print(markdown(summary))
        return
    print_report(summary, options.folder, Console())


if __name__ == "__main__":
    main()
