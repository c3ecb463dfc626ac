"""Tables for the terminal and in Markdown, and the judgement of the baseline."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from decode.evaluation import tables
from decode.evaluation.records import append, read_records, read_run, write_run
from decode.evaluation.render import make_report, print_report
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
    assert [row["suite"] for row in tables.rows(summary)] == ["Suite S"] * 3 + ["Suite Z"] * 3 + [
        "all"
    ] * 3
    assert summary.overall["drafter"].prompts == 12
    print_report(summary, folder, PlainConsole(width=80, no_color=True))
    output = capsys.readouterr().out
    assert all(len(line) <= 80 for line in output.splitlines() if "│" in line) and "…" not in output
    for part in (
        "Suite Z",
        "2.00× [2.00, 2.00]",
        "the baseline is strong",
        "left out: math500: nowhere",
    ):
        assert part in " ".join(output.split()), part


def test_no_figure_is_cut_at_80_columns(tmp_path: Path) -> None:
    """With every column at its widest, cells break but lose nothing."""
    summary, _ = make_report(fill(tmp_path / "o"))
    for name, figures in summary.overall.items():
        summary.overall[name] = replace(
            figures, bugs=12, rounding_ties=13, identical=1455, prompts=1480, tokens_per_s=12345.6
        )
    summary.suites = {"one suite": summary.overall, "another one": summary.overall}
    console = PlainConsole(width=80, no_color=True, record=True, file=io.StringIO())
    console.print(tables.table(summary))
    lines = [line for line in console.export_text().splitlines() if "│" in line]
    assert all(line.rstrip().endswith(("│", "┤")) for line in lines)
    cells = "".join(line.split("│")[-2].strip() for line in lines if "─" not in line)
    assert cells.replace(" ", "").count("1455/1480(12BUGs,13ties)") == 9


def test_the_headline_names_the_chat_options(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "o"))
    assert tables.headline(summary) == "t/<model> · greedy · float32 · Suite S"
    summary.settings.update({"template_kwargs": {"enable_thinking": False}, "system": None})
    assert tables.headline(summary).endswith(" · Suite S · enable_thinking=false")
    summary.settings["weights"] = "Q4_1 in p 1"
    assert tables.headline(summary).startswith("t/<model> (Q4_1 in p 1) · greedy")


def test_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One suite: the table. Several: a line per method, its figures over all suites, then its speed-up on
    each."""
    folder = fill(tmp_path / "one")
    summary, _ = make_report(folder)
    main([str(folder), "--markdown"])
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(tables.rows(summary)) and "Suite S" in lines[2]
    assert text.startswith("**t/&lt;model&gt; · greedy · float32 · Suite S**, up to 20 new tokens")
    folder = fill_two(tmp_path / "two")
    summary, _ = make_report(folder)
    header, body = tables.overview(summary)
    assert header[-2:] == ["Suite S", "Suite Z"] and [row[0] for row in body] == list(
        summary.overall
    )
    mine = dict(zip(header, body[-1], strict=True))
    assert mine["Suite S"] == mine["Suite Z"] == "2.00×" and mine["speed-up [95%]"].startswith(
        "2.00× ["
    )
    assert mine["accepted at 1, 2, 4, 8"] == "1.00 0.00" and mine["identical"] == "12/12"
    main([str(folder), "--markdown"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(body) and "Suite Z" in lines[0]


@pytest.mark.parametrize(
    ("parameters", "ratios", "says"),
    [
        (10**8, [0.90, 0.95, 0.93], "SLOWER than transformers"),
        (10**8, [0.90, 1.05, 0.93], "the repeats differ too much to judge"),
        (10**8, [1.00, 1.05, 1.01], ": the baseline is strong."),
        (10**6, [0.60, 0.70, 0.65], "the same tokens)."),  # toys are not judged
    ],
)
def test_a_baseline_is_judged_by_all_its_repeats(
    parameters: int, ratios: list[float], says: str
) -> None:
    check = {
        "plain_tokens_per_s": 9.0,
        "transformers_tokens_per_s": 10.0,
        "ratio": ratios[2],
        "parameters": parameters,
    }
    line = tables.baseline_line({**check, "ratios": ratios, "repeats": 3, "identical": True})
    assert says in line and f"best of 3, {min(ratios):.2f} to {max(ratios):.2f} each" in line
