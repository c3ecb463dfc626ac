"""Every number on the page is one of the records'; several runs on one page; the share card."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path

import pytest

from decode.evaluation import statistics as stats
from decode.evaluation.page import compare_runs, make_report
from decode.evaluation.records import read_records, write_replays
from tests.measurements import fill_report

ROUND = {"seconds": 0.5, "accepted": ["a", "b"], "own": "c", "rejected": ["d"]}


def page_data(text: str) -> dict:
    found = re.search(r'id="report-data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_charts_show_what_the_records_say(tmp_path: Path) -> None:
    folder = fill_report(tmp_path / "o")
    write_replays(
        folder,
        [{"title": "s: p", "prompt": "<blink>", "lanes": [{"method": "plain", "rounds": [ROUND]}]}],
    )
    summary, _ = make_report(folder)
    records = read_records(folder)
    text = (folder / "report.html").read_text()
    data = page_data(text)
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert set(charts) == {"speed", "positions", "tau", "time"} and "<blink>" not in text
    plain = stats.times(records, "plain")
    for trace in charts["speed"]["traces"]:
        found = stats.paired_ratio(plain, stats.times(records, trace["name"]))
        assert trace["y"] == [found.value]
        assert trace["error_y"]["array"] == [pytest.approx(found.hi - found.value)]
    by_method = {trace["name"]: trace for trace in charts["positions"]["traces"]}
    mine = [record for record in records if record.method == "drafter"]
    assert by_method["drafter"]["y"] == [one.unconditional for one in stats.acceptance(mine)]
    for trace in charts["tau"]["traces"]:
        counted = stats.counts(records, trace["name"]).values()
        assert trace["y"] == [committed / calls for committed, calls in counted]
    for trace in charts["time"]["traces"]:
        assert len(trace["x"]) == len(trace["y"])
    assert data["replays"][0]["lanes"][0]["rounds"] == [ROUND]
    speedup = summary.overall["drafter"].speedup
    assert f"<b>{speedup.value:.2f}×</b>" in text
    ids = re.findall(r'id="plot-([\w-]+)"', text)
    assert sorted(ids) == sorted(charts) and all(f"plot-{name}" in text for name in charts)


def test_several_runs_on_one_page(tmp_path: Path) -> None:
    folders = [fill_report(tmp_path / name, gain) for name, gain in (("a", 2.0), ("b", 1.5))]
    text = compare_runs(folders)
    (chart,) = page_data(text)["charts"]
    drafter = next(trace for trace in chart["traces"] if trace["name"] == "drafter")
    assert drafter["x"] == ["a", "b"]
    assert drafter["y"] == [pytest.approx(2.0), pytest.approx(1.5)]
    assert "Settings that differ" in text


def test_the_share_card_has_its_size(tmp_path: Path) -> None:
    make_report(fill_report(tmp_path / "o"))
    png = (tmp_path / "o/share.png").read_bytes()
    assert struct.unpack(">II", png[16:24]) == (1200, 630)
