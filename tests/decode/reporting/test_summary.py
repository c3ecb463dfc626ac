"""The figures of a summary, its verdict, ties and bugs."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from align.common.terminal import PlainConsole
from decode.reporting import tables
from decode.reporting.records import Divergence, append, read_records, read_run, write_run
from decode.reporting.render import make_report, print_report
from decode.reporting.summary import above_tau, exceeds_tau, summarise, verdict
from tests.measurements import fill_report as fill
from tests.measurements import record

pytestmark = pytest.mark.usefixtures("no_plots")


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
    console = PlainConsole(width=80, record=True, file=io.StringIO())
    print_report(summary, tmp_path / "s", console)
    for text in (console.export_text(), (tmp_path / "s/report.html").read_text(), tables.markdown(summary)):
        assert "lookup against gamma=2, prompt by prompt" in text
        assert "+0.889 [+0.889, +0.889]" in text  # 20 tokens in 10 calls, not 18


def test_verdict_in_plain_words(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "a"))
    assert "The drafter makes the target faster by 2.00× (95% interval 2.00 to 2.00)" in summary["verdict"]
    assert "6 prompts (Suite S), greedy" in summary["verdict"]
    assert "identical to plain decoding's on 6 of 6 prompts" in summary["verdict"]
    assert "not idle" not in summary["verdict"]
    slower = summarise(read_run(tmp_path / "a"), read_records(fill(tmp_path / "b", gain=0.5)))
    assert "SLOWER: 0.50×" in verdict(slower)
    drafter = summary["overall"]["drafter"]
    accepted, drafter["mean_accepted"] = drafter["mean_accepted"], 0.0
    assert "The drafter can't make the target faster, as hardly a draft was accepted" in verdict(summary)
    drafter["mean_accepted"] = accepted
    summary["load_average"] = {"min": 3.0, "median": 3.5, "max": 4.0}
    assert "not idle (load 3.5 on 2 cores)" in verdict(summary)
    sampled, _ = make_report(fill(tmp_path / "c", temperature=1.0))
    assert "identity does not apply" in sampled["verdict"] and "temperature 1" in sampled["verdict"]
    assert sampled["suites"]["s"]["drafter"]["identical"] is None


def test_a_speed_up_above_tau_is_flagged(tmp_path: Path) -> None:
    """Beyond both intervals, in the verdict, the page and the table in Markdown; at τ itself it is not."""
    said = "a speed-up above τ (drafter 3.00× at τ 2.00)"
    for gain, flagged in ((1.5, False), (2.0, False), (3.0, True)):
        folder = fill(tmp_path / str(gain), gain=gain)
        summary, _ = make_report(folder)
        texts = (summary["verdict"], (folder / "report.html").read_text(), tables.markdown(summary))
        assert [said in text for text in texts] == [flagged] * 3
        assert ("above τ" in summary["verdict"]) is flagged
    figures = summary["overall"]["drafter"]
    assert exceeds_tau(figures) and not exceeds_tau({**figures, "speedup_lo": 1.9})
    assert not exceeds_tau({**figures, "tau_hi": 3.1})
    assert exceeds_tau({**figures, "speedup_lo": None, "tau_hi": None})  # one prompt has no interval
    assert not exceeds_tau({**figures, "speedup": None, "speedup_lo": None})


def test_a_speed_up_above_tau_on_one_suite_names_it(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "a", gain=3.0))
    good = {**summary["overall"]["drafter"], "speedup": 1.2, "speedup_lo": 1.1, "speedup_hi": 1.3}
    summary["overall"]["drafter"] = good
    summary["suites"]["t"] = {"plain": summary["overall"]["plain"], "drafter": good}
    assert "drafter on Suite S 3.00× at τ 2.00" in above_tau(summary)


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
