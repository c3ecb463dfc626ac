"""The report reads records alone: no torch, nothing fetched, the same figures every time."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from decode.reporting import tables
from decode.reporting.figures import by_suite, ranked
from decode.reporting.records import Divergence, Record, Run, append, read_records, read_run, write_run
from decode.reporting.render import make_report, print_report
from decode.reporting.summary import summarise, verdict
from tests.builders import record

ROOT = Path(__file__).parents[3]


def fill(folder: Path, gain: float = 2.0, temperature: float = 0.0, change: Divergence | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    settings = {
        "target": "t/<model>", "methods": ["plain", "lookup", "drafter"], "temperature": temperature,
        "max_new_tokens": 20, "dtype": "float32", "seed": 0, "repeats": 1, "warmup": 1, "threads": 2,
        "target_hash": "ab", "drafter_hash": "cd",
    }  # fmt: skip
    sources = [
        {
            "name": "s",
            "title": "Suite S",
            "group": "chat",
            "prompts": 6,
            "source": "the package s==1 (6 of 9)",
        }
    ]
    write_run(folder, Run(settings, sources, machine={"cores": 2}, versions={"torch": "2"}))
    rows: list[Record] = []
    for i in range(6):
        same = None if temperature else True
        slow = 1.0 + 0.1 * i
        rows.append(record("plain", f"p{i}", slow, 20, 20, [0] * 20, [0] * 20, identical=same, load=0.2))
        rows.append(
            record(
                "lookup",
                f"p{i}",
                slow * (1 + (-0.1) ** (i % 2)),
                20,
                18,
                [1, 1, *[0] * 16],
                [1] * 18,
                identical=same,
            )
        )
        mine = record("drafter", f"p{i}", slow / gain, 20, 10, [1] * 10, [3] * 10, identical=same)
        if change is not None and i == 0:
            mine.identical, mine.divergence = False, change
        rows.append(mine)
    append(folder, rows)
    return folder


def test_summary_holds_the_promised_figures(tmp_path: Path) -> None:
    summary, records = make_report(fill(tmp_path / "o"))
    figures = summary["suites"]["s"]["drafter"]
    assert figures["speedup"] == pytest.approx(2.0) == pytest.approx(figures["speedup_lo"])
    assert figures["tau"] == figures["tau_macro"] == 2.0 and figures["mean_accepted"] == 1.0
    assert (figures["prompts"], figures["identical"], figures["bugs"], figures["rounding_ties"]) == (
        6,
        6,
        0,
        0,
    )
    assert figures["tokens_per_s"] == pytest.approx(120 / sum((1 + 0.1 * i) / 2 for i in range(6)))
    assert [a["unconditional"] for a in figures["acceptance"]] == [1.0, 0.0, 0.0]
    assert summary["suites"]["s"]["plain"]["speedup"] == 1.0 and summary["overall"]["drafter"] == figures
    assert summary["target_hash"] == "ab" and summary["drafter_hash"] == "cd" and summary["records"] == 18
    assert json.loads((tmp_path / "o/summary.json").read_text()) == json.loads(json.dumps(summary))


def test_a_sweep_says_what_its_points_gain_over_the_first(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    names = {"lookup": "lookup:gamma=2", "drafter": "lookup:gamma=4"}
    records = [replace(r, method=names.get(r.method, r.method)) for r in read_records(folder)]
    run = read_run(folder)
    settings = {**run.settings, "methods": ["plain", *names.values()], "sweep": ["gamma=2,4"]}
    (tmp_path / "s").mkdir()
    write_run(tmp_path / "s", replace(run, settings=settings))
    append(tmp_path / "s", records)
    summary, _ = make_report(tmp_path / "s")
    assert [point["point"] for point in summary["against_first"]] == ["gamma=4"]
    console = Console(width=80, record=True, file=io.StringIO())
    print_report(summary, tmp_path / "s", console)
    for text in (console.export_text(), (tmp_path / "s/report.html").read_text(), tables.markdown(summary)):
        assert "lookup against gamma=2, prompt by prompt" in text
        assert "+0.889 [+0.889, +0.889]" in text  # 20 tokens in 10 calls, not 18


def test_remaking_changes_nothing(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    names = ("summary.json", "report.html", "report.png")
    make_report(folder)
    first = [(folder / name).read_bytes() for name in names]
    make_report(folder)
    assert [(folder / name).read_bytes() for name in names] == first


def test_the_page_stands_alone(tmp_path: Path) -> None:
    make_report(fill(tmp_path / "o"))
    page = (tmp_path / "o/report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    assert "t/&lt;model&gt;" in page and "<model>" not in page
    assert "6 of 9" in page and "2.00×" in page
    assert (tmp_path / "o/report.png").read_bytes().startswith(b"\x89PNG")


def test_report_imports_no_torch(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    code = (
        "import sys; from decode.report import main\n"
        f"main([{str(folder)!r}])\n"
        "heavy = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert "Suite S" in done.stdout and "report.html" in done.stdout


def test_verdict_in_plain_words(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "a"))
    assert "The drafter makes the target faster by 2.00× (95% interval 2.00 to 2.00)" in summary["verdict"]
    assert "6 prompts (Suite S), greedy" in summary["verdict"]
    assert "identical to plain decoding's on 6 of 6 prompts" in summary["verdict"]
    assert "not idle" not in summary["verdict"]
    slower = summarise(read_run(tmp_path / "a"), read_records(fill(tmp_path / "b", gain=0.5)))
    assert "SLOWER: 0.50×" in verdict(slower)
    summary["load_average"] = {"min": 3.0, "median": 3.5, "max": 4.0}
    assert "not idle (load 3.5 on 2 cores)" in verdict(summary)
    sampled, _ = make_report(fill(tmp_path / "c", temperature=1.0))
    assert "identity does not apply" in sampled["verdict"] and "temperature 1" in sampled["verdict"]
    assert sampled["suites"]["s"]["drafter"]["identical"] is None


def test_a_disturbed_or_unfinished_run_says_so(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    summary, _ = make_report(folder)
    assert summary["plain_spread"] == pytest.approx(1.5)
    assert "disturbed" not in verdict(summary) and "UNFINISHED" not in verdict(summary)
    append(folder, [record("plain", "p5", 9.0, 20, 20, [0] * 20, [0] * 20, identical=True)])
    summary, _ = make_report(folder)
    assert "disturbed (plain decoding's own speed varied 9.0-fold" in verdict(summary)
    run = read_run(folder)
    run.suites[0]["prompts"] = 40
    write_run(folder, run)
    summary, _ = make_report(folder)
    assert "UNFINISHED: 6 of 40 prompts" in verdict(summary)


def test_ties_and_bugs_are_told_apart(tmp_path: Path) -> None:
    tie = Divergence(4, 7, 8, "rounding tie", 1e-6, 4e-5, True, True)
    summary, records = make_report(fill(tmp_path / "a", change=tie))
    figures = summary["suites"]["s"]["drafter"]
    assert (figures["identical"], figures["rounding_ties"], figures["bugs"], summary["bugs"]) == (5, 1, 0, 0)
    assert "5 of 6" in summary["verdict"] and "rounding tie" in summary["verdict"]
    assert read_records(tmp_path / "a") == records and any(r.divergence == tie for r in records)
    assert "rounding tie" in (tmp_path / "a/report.html").read_text()
    summary, _ = make_report(fill(tmp_path / "b", change=Divergence(4, 7, 8, "BUG", 1.0, 4e-5)))
    assert summary["bugs"] == 1 and "OUTPUT CHANGED by drafter: 1 difference" in summary["verdict"]


def test_the_table_fits_80_columns_and_names_several_suites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fill(tmp_path / "o")
    rows = [asdict(r) for r in read_records(folder)]
    append(folder, [Record(**{**row, "suite": "z"}) for row in rows])
    run = json.loads((folder / "run.json").read_text())
    run["suites"].append({"name": "z", "title": "Suite Z", "group": "", "prompts": 6, "source": "here"})
    run["baseline"] = {
        "plain_tokens_per_s": 30.0, "transformers_tokens_per_s": 25.0, "ratio": 1.2, "identical": True,
    }  # fmt: skip
    run["skipped"] = ["math500: nowhere"]
    (folder / "run.json").write_text(json.dumps(run))
    summary, _ = make_report(folder)
    assert [row["suite"] for row in tables.rows(summary)] == ["Suite S"] * 3 + ["Suite Z"] * 3 + ["all"] * 3
    assert summary["overall"]["drafter"]["prompts"] == 12
    print_report(summary, folder, Console(width=80, no_color=True))
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines() if "│" in line) and "…" not in output
    for part in ("Suite Z", "2.00× [2.00, 2.00]", "an honest baseline", "left out: math500: nowhere"):
        assert part in output.replace("\n", " "), part


def test_no_figure_is_cut_at_80_columns(tmp_path: Path) -> None:
    """With every column at its widest, all of it is there, broken where it has to be."""
    summary, _ = make_report(fill(tmp_path / "o"))
    for figures in summary["overall"].values():
        figures |= {
            "bugs": 12,
            "rounding_ties": 13,
            "identical": 1455,
            "prompts": 1480,
            "tokens_per_s": 12345.6,
        }
    summary["suites"] = {"one suite": summary["overall"], "another one": summary["overall"]}
    console = Console(width=80, no_color=True, record=True, file=io.StringIO())
    console.print(tables.table(summary))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    assert all(line.rstrip().endswith(("│", "┤")) for line in lines)
    cells = "".join(line.split("│")[-2].strip() for line in lines if "─" not in line)
    assert cells.replace(" ", "").count("1455/1480(12BUGs,13ties)") == 9


def test_later_records_of_the_same_generation_count(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    append(folder, [record("plain", "p0", 99.0, 20, 20)])
    records = read_records(folder)
    assert len(records) == 18 and records[0].seconds == 99.0


def test_markdown_is_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from decode.report import main

    folder = fill(tmp_path / "run")
    summary, _ = make_report(folder)
    main([str(folder), "--markdown"])
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(tables.rows(summary)) and "Suite S" in lines[2]
    assert text.startswith("**t/<model> · greedy · float32 · Suite S**, up to 20 new tokens")


def test_many_methods_have_a_line_each(tmp_path: Path) -> None:
    """And no bars side by side; every name is on the axes, over all suites and on each."""
    folder = fill(tmp_path / "run")
    run = read_run(folder)
    run.suites.append({**run.suites[0], "name": "z", "title": "Suite Z"})
    names = [f"lookup:gamma={n}" for n in range(1, 41)]
    run.settings["methods"] += names
    write_run(folder, run)
    rows = read_records(folder)
    append(folder, [replace(r, method=n) for n in names for r in rows if r.method == "lookup"])
    append(folder, [replace(r, suite="z") for r in read_records(folder)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # a layout without room is one
        summary, _ = make_report(folder)
    figure = Figure()
    ranked(figure.subplots(), summary, "speedup", "speed-up")
    by_suite(other := figure.subplots(), summary, "tau", "tau")
    for axes, order in ((figure.axes[0], -1), (other, 1)):
        shown = [label.get_text() for label in axes.get_yticklabels()]
        assert shown[::order] == ["lookup", "drafter", *names]


def test_several_suites_have_an_overview(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line a method: its figures over all suites, then its speed-up on each."""
    from decode.report import main

    folder = fill(tmp_path / "run")
    run = read_run(folder)
    run.suites.append({**run.suites[0], "name": "z", "title": "Suite Z"})
    write_run(folder, run)
    append(folder, [replace(r, suite="z", seconds=r.seconds * 2) for r in read_records(folder)])
    summary, _ = make_report(folder)
    header, body = tables.overview(summary)
    assert header[-2:] == ["Suite S", "Suite Z"] and [row[0] for row in body] == list(summary["overall"])
    mine = dict(zip(header, body[-1], strict=True))
    assert mine["Suite S"] == mine["Suite Z"] == "2.00×" and mine["speed-up [95%]"].startswith("2.00× [")
    assert mine["accepted at 1, 2, 4, 8"] == "1.00 0.00" and mine["identical"] == "12/12"
    main([str(folder), "--markdown"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(body) and "Suite Z" in lines[0]
    assert (folder / "report.html").read_text().count("<th>Suite Z</th>") == 1
