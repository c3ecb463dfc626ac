"""Tables for the terminal and in Markdown, and the judgement of the baseline."""

from dataclasses import replace
from pathlib import Path

import pytest

from decode.evaluation import tables
from decode.evaluation.page import compare_runs, make_report, print_report
from decode.evaluation.records import (
    Divergence,
    append,
    read_records,
    read_run,
    write_records,
    write_run,
)
from decode.report import main
from specalign.common.terminal import PlainConsole
from tests.measurements import fill_report as fill

pytestmark = pytest.mark.usefixtures("no_plots")


def fill_two(folder: Path) -> Path:
    """A measurement of two suites."""
    fill(folder)
    run = read_run(folder)
    run.suites.append({**run.suites[0], "name": "z", "title": "Suite Z"})
    run.baseline = {
        "plain_tokens_per_s": 30.0, "transformers_tokens_per_s": 25.0, "ratio": 1.2, "identical": True,
    }  # fmt: skip
    run.skipped = ["math500: nowhere"]
    write_run(folder, run)
    append(folder, [replace(r, suite="z", seconds=r.seconds * 2) for r in read_records(folder)])
    return folder


def test_the_table_fits_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fill_two(tmp_path / "o")
    summary, _ = make_report(folder)
    suites = ["Suite S"] * 3 + ["Suite Z"] * 3 + ["all"] * 3
    assert [row["suite"] for row in tables.rows(summary)] == suites
    assert summary.overall["drafter"].prompts == 12
    print_report(summary, folder, PlainConsole(width=80, no_color=True))
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines() if "│" in line) and "…" not in output
    shown = " ".join(output.split())
    assert "Suite Z" in shown and "2.00× [2.00, 2.00]" in shown
    assert "the baseline is strong" in shown and "skipped: math500: nowhere" in shown


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One suite: the table. Several: a line per method, its figures over all suites, then its speed-up on
    each."""
    folder = fill(tmp_path / "one")
    summary, _ = make_report(folder)
    main([str(folder), "--markdown"])
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    against = next(iter(tables.against_first(summary).values()))
    assert len(lines) == 4 + len(tables.rows(summary)) + len(against) and "Suite S" in lines[2]
    assert text.startswith("**t/&lt;model&gt; · greedy · float32 · Suite S**, up to 20 new tokens")
    folder = fill_two(tmp_path / "two")
    summary, _ = make_report(folder)
    header, body = tables.overview(summary)
    assert header[-2:] == ["Suite S", "Suite Z"]
    assert [row[0] for row in body] == list(summary.overall)
    mine = dict(zip(header, body[-1], strict=True))
    assert mine["Suite S"] == mine["Suite Z"] == "2.00×"
    assert mine["speed-up [95%]"].startswith("2.00× [")
    assert mine["accepted at 1, 2, 4, 8"] == "1.00 0.00" and mine["identical"] == "12/12"
    main([str(folder), "--markdown"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 4 + len(body) + len(against) and "Suite Z" in lines[0]


def test_no_reservation_is_lost_in_comparisons_and_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bug = Divergence(4, 7, 8, "BUG", 1.0, 4e-5)
    folders = [fill(tmp_path / "lossy"), fill(tmp_path / "bug", change=bug)]
    rows = [replace(r, load=9.0) for r in read_records(folders[0])]
    write_records(
        folders[0], [replace(r, verifier="lossy_x" * (r.method == "drafter")) for r in rows]
    )
    run = read_run(folders[0])
    run.suites[0]["prompts"] = 9
    write_run(folders[0], run)
    page = compare_runs(folders)
    assert "<td>drafter, lossy_x</td>" in page and "5/6 (1 BUG)" in page
    said = {
        folders[0]: (
            "decodes faster: 2.00×, with another output distribution, on a busy machine",
            "NOT LOSSLESS: drafter was verified by lossy_x",
            "UNFINISHED: 6 of 9 prompts",
            "The machine was not idle (load 9.0",
        ),
        folders[1]: ("OUTPUT CHANGED by drafter", "1 difference that rounding does not explain"),
    }
    for folder, lines in said.items():
        main([str(folder), "--markdown"])
        text = capsys.readouterr().out
        for line in lines:
            assert line in page and line in text


def test_accuracy_says_what_was_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Methods that score alike share a row; a suite without scores has its reason."""
    folder = fill(tmp_path / "o")
    run = read_run(folder)
    metrics = {"math": "exact match", "code": "pass@1", "gold": "ROUGE-L", "chat": ""}
    run.suites = [
        {**run.suites[0], "name": name, "title": name.title(), "metric": metric}
        for name, metric in metrics.items()
    ]
    run.suites.append({**run.suites[0], "name": "huge", "title": "Huge", "prompts": 0})
    write_run(folder, run)
    plain = [replace(r, suite="math", score=0.5) for r in read_records(folder)]
    rows = [replace(r, score=0.75) if r.method == "drafter" else r for r in plain]
    others = [
        replace(r, suite=name, score=None) for name in metrics for r in rows if name != "math"
    ]
    (folder / "records.jsonl").unlink()
    append(folder, [*rows, *others])
    summary, _ = make_report(folder)
    assert tables.accuracy_rows(summary) == [
        ["Math", "exact match", "6/6, 100% cut", "plain, lookup", "0.500", "0.000 [0.000, 0.000]"],
        ["Math", "exact match", "6/6, 100% cut", "drafter", "0.750", "0.250 [0.250, 0.250]"],
    ]
    assert "Scores of plain decoding and drafter: Math 0.500 and 0.750 (" in summary.verdict
    lines = [
        "not scored: code (the answers are code, which only --execute-code runs)",
        "not scored: gold (the rows have no reference answers)",
        "not scored: chat (open answers, without a metric here)",
        "not scored: huge (no prompt fits this target)",
    ]
    assert tables.unscored(summary) == lines
    print_report(summary, folder, PlainConsole(width=80, no_color=True), sources=False)
    printed, page = capsys.readouterr().out, (folder / "report.html").read_text()
    for part in ("Accuracy: mean score", *lines):
        assert part in printed and part in page
    assert all(len(line) <= 80 for line in printed.splitlines() if "│" in line)
