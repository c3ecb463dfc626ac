"""The figures of a summary, its verdict, ties and bugs, and the files of a report."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decode import eval
from decode.evaluation import tables
from decode.evaluation.page import make_report
from decode.evaluation.records import Divergence, Run, append, read_records, read_run, write_run
from decode.evaluation.summary import summarise
from decode.evaluation.verdict import headline, verdict
from tests.measurements import fill_report as fill
from tests.measurements import record

pytestmark = pytest.mark.usefixtures("no_plots")


def test_the_figures(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "o"))
    figures = summary.suites["s"]["drafter"]
    assert figures.speedup is not None and figures.tau is not None
    assert figures.speedup.value == pytest.approx(2.0) == pytest.approx(figures.speedup.lo)
    assert figures.tau.value == figures.tau_macro == 2.0 and figures.mean_accepted == 1.0
    assert (figures.prompts, figures.identical, figures.bugs, figures.rounding_ties) == (6, 6, 0, 0)
    assert figures.tokens_per_s == pytest.approx(120 / sum((1 + 0.1 * i) / 2 for i in range(6)))
    assert [a.unconditional for a in figures.acceptance] == [1.0, 0.0, 0.0]
    assert summary.overall["drafter"] == figures and summary.records == 18
    saved = json.loads((tmp_path / "o/summary.json").read_text())
    assert saved["target_hash"] == "ab" and saved["drafter_hash"] == "cd"
    flat = saved["suites"]["s"]["drafter"]
    assert (flat["speedup"], flat["speedup_lo"]) == (figures.speedup.value, figures.speedup.lo)
    assert saved["overall"]["plain"]["speedup"] == 1.0 and flat["acceptance"][0]["position"] == 1


def test_the_verdict(tmp_path: Path) -> None:
    summary, _ = make_report(fill(tmp_path / "a"))
    assert "faster by 2.00× (95% interval 2.00 to 2.00)" in summary.verdict
    assert "identical to plain decoding's on 6 of 6 prompts" in summary.verdict
    assert "not idle" not in summary.verdict
    slower = summarise(read_run(tmp_path / "a"), read_records(fill(tmp_path / "b", gain=0.5)))
    assert "SLOWER: 0.50×" in verdict(slower)
    summary.load_average = {"min": 3.0, "median": 3.5, "max": 4.0}
    assert "not idle (load 3.5 on 2 cores)" in verdict(summary)
    sampled, _ = make_report(fill(tmp_path / "c", temperature=1.0))
    assert "so they are not compared" in sampled.verdict
    assert sampled.suites["s"]["drafter"].identical is None


def test_a_speed_up_above_tau_is_flagged(tmp_path: Path) -> None:
    note = "a speed-up above τ (drafter 3.00× at τ 2.00)"
    for gain, flagged in ((1.5, False), (2.0, False), (3.0, True)):
        summary, _ = make_report(fill(tmp_path / str(gain), gain=gain))
        assert (note in summary.verdict) == flagged == headline(summary).endswith(", above τ")


def test_headline_and_verdict_agree_on_noise(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o", gain=1.2)
    rows = [replace(r, accepted=[0] * r.calls, tau=1.0) for r in read_records(folder)]
    summary = summarise(read_run(folder), rows)
    assert "can't make the target faster" in verdict(summary)
    assert headline(summary) == "<model>: no measurable difference (1.20×), the same output"
    assert "train it further" in eval.suggest_next(summary, eval.read_config([]))


def test_the_headline_of_a_choice_says_so(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    run, rows = read_run(folder), read_records(folder)
    rows = [replace(r, method=r.method.replace("drafter", "block:steps=2")) for r in rows]
    run.settings["methods"] = ["plain", "lookup", "block:steps=2"]
    assert headline(summarise(run, rows)).endswith("with the same output, best of 2 methods")
    run.settings["sweep"] = ["steps=1,2"]
    assert headline(summarise(run, rows)).endswith(", best of 2 points")


def test_only_measured_suites_are_named(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    run = read_run(folder)
    skipped = {"name": "aime", "title": "AIME", "batch_sizes": [], "metric": "exact match"}
    run.suites.append({**run.suites[0], **skipped})
    write_run(folder, run)
    summary, _ = make_report(folder)
    assert "AIME" not in verdict(summary) + tables.markdown(summary) + tables.headline(summary)
    assert tables.unscored(summary)[1:] == ["not scored: aime (not measured)"]


def test_a_disturbed_or_unfinished_run(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    summary, _ = make_report(folder)
    assert summary.plain_spread == pytest.approx(1.5)
    assert "disturbed" not in summary.verdict and "UNFINISHED" not in summary.verdict
    append(folder, [record("plain", "p5", 3.0, 20, 20, [0] * 20, [0] * 20, identical=True)])
    run = read_run(folder)
    run.suites[0]["prompts"] = 40
    write_run(folder, run)
    summary, _ = make_report(folder)
    assert "not idle (plain decoding's own speed varied 3.0-fold" in summary.verdict
    assert headline(summary).endswith("on a busy machine")
    assert "UNFINISHED: 6 of 40 prompts" in summary.verdict
    run.suites[0]["prompts"] = 6
    run.settings |= {"repeats": 2, "batch_sizes": [1, 4]}
    write_run(folder, run)
    assert "UNFINISHED: 6 of 24 outputs;" in make_report(folder)[0].verdict


def test_ties_and_bugs_are_told_apart(tmp_path: Path) -> None:
    tie = Divergence(4, 7, 8, "rounding tie", 1e-6, 4e-5, True, True)
    summary, records = make_report(fill(tmp_path / "a", change=tie))
    figures = summary.suites["s"]["drafter"]
    assert (figures.identical, figures.rounding_ties, figures.bugs, summary.bugs) == (5, 1, 0, 0)
    assert "5 of 6" in summary.verdict and "rounding tie" in summary.verdict
    assert headline(summary).endswith("with the same output up to rounding ties")
    assert read_records(tmp_path / "a") == records and any(r.divergence == tie for r in records)
    assert "rounding tie" in (tmp_path / "a/report.html").read_text()
    summary, _ = make_report(fill(tmp_path / "b", change=Divergence(4, 7, 8, "BUG", 1.0, 4e-5)))
    assert summary.bugs == 1 and "OUTPUT CHANGED by drafter: 1 difference" in summary.verdict


def test_a_bug_at_a_later_batch_size_counts(tmp_path: Path) -> None:
    folder = fill(tmp_path / "o")
    run = read_run(folder)
    run.settings["batch_sizes"] = [1, 4]
    write_run(folder, run)
    later = fill(tmp_path / "later", change=Divergence(4, 7, 8, "BUG", 1.0, 4e-5))
    append(folder, [replace(r, batch=4) for r in read_records(later)])
    summary, _ = make_report(folder)
    for figures in (summary.overall["drafter"], summary.suites["s"]["drafter"]):
        assert (figures.identical, figures.bugs, figures.prompts) == (5, 1, 6)
    assert [f["drafter"].identical for f in summary.batches.values()] == [6, 5]
    assert "OUTPUT CHANGED by drafter: 1 difference" in summary.verdict
    assert headline(summary) == "<model>: OUTPUT CHANGED by drafter"
    page = (folder / "report.html").read_text()
    assert "<b>5/6</b>" in page
    assert page.count("5/6 (1 BUG)") == 4  # figures and batches, also in Markdown
    assert "<td>s</td><td>p0</td><td>drafter</td><td>4</td>" in page


def test_every_point_is_compared_with_the_first_prompt_by_prompt() -> None:
    points = {"a:draft_tokens=4": (1.0, 10), "a:draft_tokens=8": (0.5, 8)}
    points |= {"a:draft_tokens=16": (2.0, 5), "b:draft_tokens=4": (1.0, 9)}
    records = [
        record(method, prompt, seconds * slow, 20, calls + i)
        for i, (prompt, slow) in enumerate([("x", 1.0), ("y", 3.0), ("z", 9.0)])
        for method, (seconds, calls) in points.items()
        if (method, prompt) != ("a:draft_tokens=16", "z")  # the run was interrupted
    ]
    run = Run({"methods": list(points), "temperature": 0, "sweep": ["draft_tokens=4,8,16"]}, [])
    faster, slower = summarise(run, records).against_first
    assert (faster.first, faster.point, faster.prompts) == ("draft_tokens=4", "draft_tokens=8", 3)
    assert faster.tau is not None and faster.tau.value == pytest.approx(60 / 27 - 60 / 33)
    # the prompts' own speeds differ ninefold, their ratio does not
    assert faster.speed is not None
    assert [faster.speed.value, faster.speed.lo, faster.speed.hi] == pytest.approx([2.0] * 3)
    assert slower.speed is not None and slower.tau is not None
    assert (slower.method, slower.prompts, slower.speed.value) == ("a:draft_tokens=16", 2, 0.5)
    assert slower.tau.value == pytest.approx(40 / 11 - 40 / 21) and slower.tau.lo is None
    del run.settings["sweep"]  # methods are compared alike
    first, *others = points
    gains = summarise(run, records).against_first
    assert [(gain.first, gain.point) for gain in gains] == [(first, other) for other in others]
    assert gains[0].speed == faster.speed and gains[0].tau == faster.tau
    run.settings["tuning"] = 1
    assert summarise(run, records).against_first == []
